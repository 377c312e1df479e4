"""High losses after an alarm that was attributed to different data: when to review them.

A bad part of the data looks like a new task at first: the loss is high at once, and the model
begins to fit it. Only the data that follow show the difference (`Assessor.review`). Nobody knows
when they come, so the period is reviewed several times until the loss is back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

_REVIEWS = (16, 24, 32, 48, 64, 96, 128)  # steps; what lasts longer is this run's data
_LATEST = 4
_MEDIAN_OF = 8  # losses whose median shows whether the loss is back


class TrainedBatch(NamedTuple):
    """A batch and its loss."""

    index: int
    """Of the step that was trained on it."""
    batch: Any
    loss: float
    """When it was trained on."""


class HighLossPeriod:
    """The steps from an alarm on. Keeps references to a few batches.

    Args:
        onset: step of the incident's first alarm.
        before: batches of healthy steps before it, at least one.
    """

    def __init__(self, onset: int, before: Sequence[TrainedBatch]) -> None:
        self.onset = onset
        self.before = tuple(before)
        self._latest: deque[TrainedBatch] = deque(maxlen=_LATEST)
        self._losses: deque[float] = deque(maxlen=_MEDIAN_OF)
        self._steps = 0

    def add(self, index: int, batch: Any, loss: float) -> None:
        """Adds the next step."""
        self._latest.append(TrainedBatch(index, batch, loss))
        self._losses.append(loss)
        self._steps += 1

    @property
    def latest(self) -> tuple[TrainedBatch, ...]:
        """The last few steps."""
        return tuple(self._latest)

    @property
    def over(self) -> bool:
        """Whether the loss is back within its noise, or has been high for too long to come back."""
        losses = [each.loss for each in self.before]
        usual = max(losses) + (max(losses) - min(losses))
        back = len(self._losses) == _MEDIAN_OF and median(self._losses) <= usual
        return back or self._steps > _REVIEWS[-1]

    @property
    def due(self) -> bool:
        """Whether a review is due at this step."""
        return self._steps in _REVIEWS
