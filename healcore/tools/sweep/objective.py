"""Counts as rates, and the one number that variants are ranked by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from healcore.tools.sweep.scoring import Tally

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


def rates(tallies: Sequence[Tally]) -> Rates:
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


def latency(tallies: Sequence[Tally], variant: int) -> float:
    """Median rows from onset to order of the events that a variant found; NaN without one.

    As in the table of `healcore replay --labels`.
    """
    delays = np.concatenate([t.delay[variant] for t in tallies])
    found = delays[delays >= 0]
    return float(np.median(found)) if len(found) else math.nan


def rates_of(rates: Rates, tallies: Sequence[Tally], variant: int) -> dict[str, float | None]:
    """One setting's rates and latency by name; None where there was nothing to have a rate of."""
    told = {name: float(getattr(rates, name)[variant]) for name in Rates._fields[2:]}
    told["latency_rows"] = latency(tallies, variant)
    return {name: None if math.isnan(rate) else rate for name, rate in told.items()}


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
