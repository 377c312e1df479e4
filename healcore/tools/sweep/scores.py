"""Scores the orders of many settings: events found, latency, false orders, cost in steps.

Orders are compared with events as in a replay (`healcore.tools.replay.scores.compare_orders`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from healcore.tools.replay.scores import IN_TIME_ROWS, Label, compare_orders
from healcore.tools.sweep.series import RecoveryOrders, Series

PER = 10_000
"""Number of rows that rates refer to."""

OBJECTIVES = {
    "balance": "recall within N steps, minus `price` for each false recovery per 10,000 steps",
    "recall": "recall within N steps; for equal recall, fewest false recoveries",
    "false": "fewest false recoveries per 10,000 steps; for an equal number, highest recall",
    "lost": "fewest steps lost: recoveries, skipped steps, and steps from onset to order",
}

LOWER = ("false", "lost")
"""Objectives to minimize: the score is the negative rate."""

_TIE_WEIGHT = 1e-6  # of the second criterion: less than one event in any sweep


class Costs(NamedTuple):
    """Parameters of the scores."""

    within: int = IN_TIME_ROWS
    """Rows after the onset in which an event counts as found in time."""
    recovery: int = 100
    """Steps lost in a recovery, including repeated steps."""


class OrderCounts(NamedTuple):
    """Counts of every variant on one series: int64 (variants,) unless noted otherwise."""

    rows: int
    in_time: np.ndarray
    """Events found within `Costs.within` rows of their onset."""
    delay: np.ndarray
    """int32 (variants, events): rows from onset to order, or -1 for a missed event."""
    false: np.ndarray
    """False alarms."""
    lost: np.ndarray
    """Steps lost: the cost of each incident's first recovery, skipped steps, and the rows of each
    event up to the order (or the whole event without an order)."""

    @property
    def events(self) -> int:
        """Number of events of the series."""
        return self.delay.shape[1]


def own_events(series: Series, label: Label) -> Label:
    """Removes spikes that begin in rows of another attempt."""
    own = series.index[series.own :]
    return label._replace(
        spikes=tuple(zone for zone in label.spikes if own[0] <= zone.onset <= own[-1])
    )


def count_orders(
    series: Series, events: Label, orders: RecoveryOrders, costs: Costs
) -> OrderCounts:
    """Counts the orders of one series; `events` is from `own_events`."""
    rows, variants = series.index[orders.row], len(orders.skipped)
    delay, false = compare_orders(rows, orders.variant, variants, series.nonfinite, events)
    length = np.array([zone.end - zone.onset + 1 for zone in events.spikes], np.int64)
    until = np.where(delay < 0, length, np.minimum(delay, length)).sum(axis=1)
    lost = orders.skipped + costs.recovery * orders.recovered.astype(np.int64) + until
    in_time = ((delay >= 0) & (delay <= costs.within)).sum(axis=1)
    return OrderCounts(series.length - series.own, in_time, delay, false, lost)


class Rates(NamedTuple):
    """Rates of all settings: float64 (variants,), with `false` and `lost` per 10,000 rows."""

    events: int
    rows: int
    recall: np.ndarray
    """Fraction of events found within N steps. `recall` and `found` are NaN without events."""
    found: np.ndarray
    false: np.ndarray
    lost: np.ndarray


def rates(counts: Sequence[OrderCounts]) -> Rates:
    """Computes the rates over all series together."""
    events, rows = sum(each.events for each in counts), sum(each.rows for each in counts)
    in_time = np.sum([each.in_time for each in counts], axis=0)
    found = np.sum([(each.delay >= 0).sum(axis=1) for each in counts], axis=0)
    scale = PER / max(rows, 1)
    return Rates(
        events=events,
        rows=rows,
        recall=in_time / events if events else np.full(len(found), np.nan),
        found=found / events if events else np.full(len(found), np.nan),
        false=scale * np.sum([each.false for each in counts], axis=0),
        lost=scale * np.sum([each.lost for each in counts], axis=0),
    )


def latency(counts: Sequence[OrderCounts], variant: int) -> float:
    """Returns the median rows from onset to order of a variant's found events, or NaN."""
    delays = np.concatenate([each.delay[variant] for each in counts])
    found = delays[delays >= 0]
    return float(np.median(found)) if len(found) else math.nan


def rates_of(rates: Rates, counts: Sequence[OrderCounts], variant: int) -> dict[str, float | None]:
    """Returns the rates and the latency of one setting by name, with None for NaN."""
    values = {name: float(getattr(rates, name)[variant]) for name in Rates._fields[2:]}
    values["latency_rows"] = latency(counts, variant)
    return {name: None if math.isnan(value) else value for name, value in values.items()}


def score(rates: Rates, objective: str, price: float) -> np.ndarray:
    """Scores the variants, (variants,), larger is better; `price` is for "balance"."""
    # Without events, every setting has recall 0.
    recall = rates.recall if rates.events else np.zeros_like(rates.false)
    if objective == "recall":
        return recall - _TIE_WEIGHT * rates.false
    if objective == "false":
        return -rates.false + _TIE_WEIGHT * recall
    if objective == "lost":
        return -rates.lost
    return recall - price * rates.false
