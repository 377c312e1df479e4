"""`TrainedStep`: what comparisons keep of a step, to evaluate its batches again later."""

from __future__ import annotations

import math
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

    @property
    def nbytes(self) -> float:
        """Bytes of the arrays in the batches, or Inf if a batch is of an unknown type."""
        return sum(_nbytes_of(batch.content) for batch in self.batches)


def _nbytes_of(content: Any) -> float:
    """Bytes of the arrays in a batch, or Inf if it has an object of an unknown type."""
    try:
        nbytes = getattr(content, "nbytes", None)
    except Exception:  # a sparse tensor of torch has no number
        return math.inf
    if isinstance(nbytes, int):  # an array of NumPy, torch or JAX
        return nbytes
    if isinstance(content, Mapping):
        return sum(_nbytes_of(each) for each in content.values())
    if isinstance(content, list | tuple):
        return sum(_nbytes_of(each) for each in content)
    if isinstance(content, str | bytes):
        return len(content)
    if content is None or isinstance(content, bool | int | float | complex):
        return 0
    return math.inf
