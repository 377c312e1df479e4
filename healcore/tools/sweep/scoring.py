"""Orders against events: found or missed, how late, false, and what it all costs in steps.

The rules are those of `healcore.tools.replay.scoring`, for thousands of variants at once; a test
holds them equal.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from healcore.tools.replay.scoring import IN_TIME, LATE, START, Label
from healcore.tools.sweep.series import RecoveryOrders, Series


class Costs(NamedTuple):
    """What the scores count by."""

    within: int = IN_TIME
    """Rows after its onset within which an event counts as found in time."""
    recovery: int = 100
    """Steps that a recovery costs: back to the checkpoint, and the way again."""


class Ground(NamedTuple):
    """One series as it is scored."""

    spikes: np.ndarray
    """int64 (events, 4): onset and end, and from where up to where an order belongs to it."""
    neutral: np.ndarray
    """bool (rows,): an order at this row of the series is no false one."""
    rows: int
    """Own rows."""


class Tally(NamedTuple):
    """Counts of every variant on one series. int64 (variants,) where nothing else is said."""

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


def ground_of(series: Series, label: Label) -> Ground:
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
    return Ground(np.array(ends, np.int64).reshape(-1, 4), neutral, len(own))


def tally(series: Series, ground: Ground, orders: RecoveryOrders, costs: Costs) -> Tally:
    """Counts one series' orders.

    Args:
        series: the rows.
        ground: from `ground_of`.
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
    return Tally(len(ground.spikes), ground.rows, in_time, found, delays, false, lost)
