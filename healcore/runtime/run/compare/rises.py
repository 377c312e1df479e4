"""How much the loss rises from earlier weights to the current weights: pure functions of losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

ROUNDING = 1e-6
"""Relative difference up to which two float32 losses are equal."""


class Rises(NamedTuple):
    """How much better an anchor's weights are than the current weights, in one comparison.

    Two batches count: the batch of the newest step, and one that was trained on since the anchor.
    The smaller rise of the two is the evidence, so that one bad batch alone proves nothing.
    """

    evaluations: int
    """Number of evaluations of a batch that the comparison has cost."""
    evidence: float = math.nan
    """The smaller rise of the two batches, or NaN without evidence."""
    rise: float = math.nan
    """Loss of the step's batch, current minus earlier weights."""


def rise_of(now: float, then: float) -> float:
    """The current loss minus the loss of the earlier weights.

    Args:
        now: loss with the current weights. NaN and Inf count as the highest loss.
        then: loss with the earlier weights.

    Returns:
        The difference, which may be infinite. NaN if neither loss is finite: a bad batch is not
        evidence.
    """
    if math.isfinite(now) and math.isfinite(then):
        return now - then
    if math.isfinite(then):
        return math.inf
    if math.isfinite(now):
        return -math.inf
    return math.nan


def joined(
    evaluations: int,
    pair: tuple[float, float],
    past: Sequence[tuple[float, float]],
) -> Rises:
    """Joins the losses of a step's batch and of past batches.

    Earlier weights are better only if they are better on both: on a bad batch that the model has
    just seen, or that it has trained on, one of the two says little.

    Args:
        evaluations: number of evaluations of all these losses.
        pair: losses of the step's batch, with the current and with the earlier weights.
        past: the same for one or three past batches. Their median rise counts.

    Returns:
        The rises. The evidence is NaN if both batches have equal losses, because an oscillation of
        the loss looks like damage then.
    """
    now, then = pair
    rise = rise_of(now, then)
    by_rise = sorted(past, key=lambda each: rise_of(*each))
    now_past, then_past = by_rise[len(by_rise) // 2]
    rise_past = rise_of(now_past, then_past)
    if math.isclose(then, then_past, rel_tol=ROUNDING, abs_tol=0.0):
        rise_past = math.nan
    evidence = rise_past
    if rise < rise_past:  # False if `rise_past` is NaN, which stays the evidence
        evidence = rise
    return Rises(evaluations, evidence, now - then)
