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
"""Rows that a rate is given for."""

OBJECTIVES = {
    "balance": "recall within N steps, less `price` for each false recovery per 10,000 steps",
    "recall": "recall within N steps; between equals, fewer false recoveries",
    "false": "fewest false recoveries per 10,000 steps; between equals, higher recall",
    "lost": "fewest steps lost: recoveries, skipped steps, and what a spike lasts until the order",
}

LOWER = ("false", "lost")
"""Objectives to minimize: the score is the negative rate."""

_TIE = 1e-6  # weight of the second criterion: less than one event in any sweep


class Costs(NamedTuple):
    """Parameters of the scores."""

    within: int = IN_TIME_ROWS
    """Rows after its onset within which an event counts as found in time."""
    recovery: int = 100
    """Steps that a recovery costs: back to the checkpoint, and the steps done again."""


class OrderCounts(NamedTuple):
    """Counts of every variant on one series, int64 (variants,) unless noted."""

    rows: int
    in_time: np.ndarray
    """Events found within `Costs.within` rows of their onset."""
    delay: np.ndarray
    """int32 (variants, events): rows from onset to order; -1 for an event that was not found."""
    false: np.ndarray
    lost: np.ndarray
    """Steps lost: the cost of each incident's first recovery, skipped steps, and each event's rows
    until the order (all of them without one)."""

    @property
    def events(self) -> int:
        """Events of the series."""
        return self.delay.shape[1]


def own_events(series: Series, label: Label) -> Label:
    """The trace's events without spikes that begin in rows of another attempt."""
    own = series.index[series.own :]
    return label._replace(
        spikes=tuple(zone for zone in label.spikes if own[0] <= zone.onset <= own[-1])
    )


def count_orders(
    series: Series, events: Label, orders: RecoveryOrders, costs: Costs
) -> OrderCounts:
    """Counts one series' orders; `events` is from `own_events`."""
    at, variants = series.index[orders.row], len(orders.skipped)
    delay, false = compare_orders(at, orders.variant, variants, series.bad, events)
    length = np.array([zone.end - zone.onset + 1 for zone in events.spikes], np.int64)
    until = np.where(delay < 0, length, np.minimum(delay, length)).sum(axis=1)
    lost = orders.skipped + costs.recovery * orders.recovered.astype(np.int64) + until
    in_time = ((delay >= 0) & (delay <= costs.within)).sum(axis=1)
    return OrderCounts(series.length - series.own, in_time, delay, false, lost)


class Rates(NamedTuple):
    """Rates of one setting (floats) or of all (arrays): `false` and `lost` per 10,000 rows."""

    events: int
    rows: int
    recall: np.ndarray
    """Events found within N steps, of all; like `found` NaN if there is no event."""
    found: np.ndarray
    false: np.ndarray
    lost: np.ndarray


def rates(counts: Sequence[OrderCounts]) -> Rates:
    """The rates over all the traces together."""
    events, rows = sum(c.events for c in counts), sum(c.rows for c in counts)
    in_time = np.sum([c.in_time for c in counts], axis=0)
    found = np.sum([(c.delay >= 0).sum(axis=1) for c in counts], axis=0)
    share = PER / max(rows, 1)
    return Rates(
        events=events,
        rows=rows,
        recall=in_time / events if events else np.full(len(found), np.nan),
        found=found / events if events else np.full(len(found), np.nan),
        false=share * np.sum([c.false for c in counts], axis=0),
        lost=share * np.sum([c.lost for c in counts], axis=0),
    )


def latency(counts: Sequence[OrderCounts], variant: int) -> float:
    """Median rows from onset to order of the events that a variant found; NaN without one."""
    delays = np.concatenate([c.delay[variant] for c in counts])
    found = delays[delays >= 0]
    return float(np.median(found)) if len(found) else math.nan


def rates_of(rates: Rates, counts: Sequence[OrderCounts], variant: int) -> dict[str, float | None]:
    """One setting's rates and latency by name; None where there is no event."""
    found = {name: float(getattr(rates, name)[variant]) for name in Rates._fields[2:]}
    found["latency_rows"] = latency(counts, variant)
    return {name: None if math.isnan(rate) else rate for name, rate in found.items()}


def score(rates: Rates, objective: str, price: float) -> np.ndarray:
    """The number to rank by, larger is better; `price` is of a false recovery, for "balance"."""
    # Without an event, recall is 0 for every setting.
    recall = rates.recall if rates.events else np.zeros_like(rates.false)
    if objective == "recall":
        return recall - _TIE * rates.false
    if objective == "false":
        return -rates.false + _TIE * recall
    if objective == "lost":
        return -rates.lost
    return recall - price * rates.false
