"""`TrainedStep`: what comparisons keep of a step, to evaluate its batches again later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class ObservedBatch(NamedTuple):
    """A batch, or a part of one, and its weight in the loss of its step.

    Comparisons evaluate the `content` again. The loss of the step is the weighted mean of its
    batches, so the parts of a batch that was split for memory add up to the same loss as the whole
    batch.
    """

    content: Any
    """The batch as the loop has it, or a part of the batch."""
    weight: float = 1.0
    """Its share in the loss of the step; only the ratio of weights matters."""


class TrainedStep(NamedTuple):
    """One step of the run, or one dispatch of a compiled loop, and its batches.

    Comparisons evaluate the batches again, with the current and with earlier weights.
    """

    index: int
    """Number of the step, from 0; of the last step of a dispatch."""
    batches: tuple[ObservedBatch, ...]
    """All batches of an accumulation."""
    norms: Mapping[str, float] = {}
    """Engine name -> gradient norm before any clip of healcore, where it is known."""
    rates: Mapping[str, float] = {}
    """Engine name -> the learning rate in force, where the step's record has it."""
