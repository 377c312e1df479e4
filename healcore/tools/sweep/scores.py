"""Orders against events: found or missed, how late, false, the cost in steps, and the score.

The rules are those of `healcore.tools.replay.scores`, for thousands of variants at once; a test
holds them equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from healcore.tools.replay.scores import IN_TIME, LATE, START, Label
from healcore.tools.sweep.series import RecoveryOrders, Series


class Costs(NamedTuple):
    """What the scores count by."""

    within: int = IN_TIME
    """Rows after its onset within which an event counts as found in time."""
    recovery: int = 100
    """Steps that a recovery costs: back to the checkpoint, and the way again."""


class SeriesEvents(NamedTuple):
    """One series as it is scored."""

    spikes: np.ndarray
    """int64 (events, 4): onset and end, and from where up to where an order belongs to it."""
    neutral: np.ndarray
    """bool (rows,): an order at this row of the series is no false one."""
    rows: int
    """Own rows."""


class OrderCounts(NamedTuple):
    """Counts of every variant on one series. int64 (variants,) unless noted."""

    events: int
    rows: int
    in_time: np.ndarray
    """Events found within `Costs.within` rows of their onset."""
    found: np.ndarray
    """Events found at all."""
    delay: np.ndarray
    """int32 (variants, events): rows from onset to order; -1 for an event that was not found."""
    false: np.ndarray
    """False recoveries."""
    lost: np.ndarray
    """Steps lost: the cost of each incident's first recovery, every skipped step, and of each event
    the rows until the order, or all of them where there was none."""


def series_events(series: Series, label: Label) -> SeriesEvents:
    """What of the trace's events concerns the series.

    A resumed trace has one series per attempt; an event is that of the attempt whose row its onset
    is.
    """
    index = series.index
    own = index[series.own :]
    spikes = [zone for zone in label.spikes if own[0] <= zone.onset <= own[-1]]
    neutral = index < START
    for start, stop in (zone.widened for zone in (*label.ambiguous, *label.spikes)):
        neutral |= (index >= start) & (index < stop)
    if "loss" in series.rows.values:
        for row in index[~np.isfinite(series.rows.values["loss"])]:
            neutral |= (index >= row) & (index <= row + LATE)
    ends = [(zone.onset, zone.end, *zone.widened) for zone in spikes]
    return SeriesEvents(np.array(ends, np.int64).reshape(-1, 4), neutral, len(own))


def count_orders(
    series: Series, ground: SeriesEvents, orders: RecoveryOrders, costs: Costs
) -> OrderCounts:
    """Counts one series' orders.

    Args:
        series: the rows.
        ground: from `series_events`.
        orders: of all variants.
        costs: see `Costs`.
    """
    variants = len(orders.skipped)
    at = series.index[orders.row]
    zero = np.zeros(variants, np.int64)
    in_time, found = zero, zero.copy()
    delays = np.full((variants, len(ground.spikes)), -1, np.int32)
    lost = orders.skipped.astype(np.int64)
    lost += costs.recovery * orders.recovered.astype(np.int64)
    for event, (onset, end, start, stop) in enumerate(ground.spikes):
        here = (at >= start) & (at < stop)
        who, first = np.unique(orders.variant[here], return_index=True)
        delay = np.maximum(at[here][first] - onset, 0)
        found[who] += 1
        delays[who, event] = delay
        in_time[who] += delay <= costs.within
        length = end - onset + 1
        until = np.full(variants, length)
        until[who] = np.minimum(delay, length)
        lost += until
    wrong = ~ground.neutral[orders.row]
    who, where = orders.variant[wrong], at[wrong]
    first = np.ones(len(who), bool)
    first[1:] = (who[1:] != who[:-1]) | (where[1:] - where[:-1] > LATE)
    false = np.bincount(who[first], minlength=variants)
    return OrderCounts(len(ground.spikes), ground.rows, in_time, found, delays, false, lost)


PER = 10_000
"""Rows that a rate is given for."""

OBJECTIVES = {
    "balance": "recall within N steps, less `price` for each false recovery per 10,000 steps",
    "recall": "recall within N steps; between equals, fewer false recoveries",
    "false": "fewest false recoveries per 10,000 steps; between equals, higher recall",
    "lost": "fewest steps lost: recoveries, skipped steps, and what a spike lasts until the order",
}

LOWER = ("false", "lost")
"""Objectives that are a rate to keep low: the score is its negative."""

_TIE = 1e-6  # what decides between equals weighs this much: less than one event in any sweep


class Rates(NamedTuple):
    """One setting (floats) or all of them (arrays) on some traces."""

    events: int
    rows: int
    recall: np.ndarray
    """Events found within N steps, of all; NaN where there was none to find."""
    found: np.ndarray
    """Events found at all; NaN where there was none."""
    false: np.ndarray
    """False recoveries per 10,000 rows."""
    lost: np.ndarray
    """Steps lost per 10,000 rows."""


def rates(tallies: Sequence[OrderCounts]) -> Rates:
    """Sums over traces."""
    events, rows = sum(t.events for t in tallies), sum(t.rows for t in tallies)
    in_time = np.sum([t.in_time for t in tallies], axis=0)
    found = np.sum([t.found for t in tallies], axis=0)
    share = PER / max(rows, 1)
    return Rates(
        events=events,
        rows=rows,
        recall=in_time / events if events else np.full(len(found), np.nan),
        found=found / events if events else np.full(len(found), np.nan),
        false=share * np.sum([t.false for t in tallies], axis=0),
        lost=share * np.sum([t.lost for t in tallies], axis=0),
    )


def latency(tallies: Sequence[OrderCounts], variant: int) -> float:
    """Median rows from onset to order of the events that a variant found; NaN without one.

    As in the table of `healcore replay --labels`.
    """
    delays = np.concatenate([t.delay[variant] for t in tallies])
    found = delays[delays >= 0]
    return float(np.median(found)) if len(found) else math.nan


def rates_of(rates: Rates, tallies: Sequence[OrderCounts], variant: int) -> dict[str, float | None]:
    """One setting's rates and latency by name; None where there was nothing to have a rate of."""
    found = {name: float(getattr(rates, name)[variant]) for name in Rates._fields[2:]}
    found["latency_rows"] = latency(tallies, variant)
    return {name: None if math.isnan(rate) else rate for name, rate in found.items()}


def score(rates: Rates, objective: str, price: float) -> np.ndarray:
    """The number to rank by, larger is better.

    Args:
        rates: of all variants.
        objective: one of `OBJECTIVES`.
        price: of one false recovery per 10,000 rows, in recall; for "balance".
    """
    # Where there was nothing to find, nothing is to anybody's credit.
    recall = rates.recall if rates.events else np.zeros_like(rates.false)
    if objective == "recall":
        return recall - _TIE * rates.false
    if objective == "false":
        return -rates.false + _TIE * recall
    if objective == "lost":
        return -rates.lost
    return recall - price * rates.false
