"""High losses after an alarm that was taken for different data: when to look back at them.

While it lasts, a bad part of the data looks like a new task: the loss is high at once, and the
model begins to fit it. Only the data that come afterwards show what it was (`Assessor.look_back`).
When they come is not known, so it is looked at now and then, until the loss is back where it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

_LOOKS = (16, 24, 32, 48, 64, 96, 128)  # steps; what lasts longer are the data of this run
_LATEST = 4
_BACK = 8  # losses whose median tells whether it is back


class Remembered(NamedTuple):
    """One batch, and its loss."""

    index: int
    """Of the step that was trained on it."""
    batch: Any
    loss: float
    """When it was trained on."""


class Stretch:
    """The steps from an alarm on; references to a few batches are kept.

    Args:
        onset: index of the incident's first alarm.
        before: batches of healthy steps before it, at least one.
    """

    def __init__(self, onset: int, before: Sequence[Remembered]) -> None:
        self.onset = onset
        self.before = tuple(before)
        self._latest: deque[Remembered] = deque(maxlen=_LATEST)
        self._losses: deque[float] = deque(maxlen=_BACK)
        self._steps = 0

    def see(self, index: int, batch: Any, loss: float) -> None:
        """Takes the next step that was judged."""
        self._latest.append(Remembered(index, batch, loss))
        self._losses.append(loss)
        self._steps += 1

    @property
    def latest(self) -> tuple[Remembered, ...]:
        """The last few steps."""
        return tuple(self._latest)

    @property
    def over(self) -> bool:
        """Whether the loss is back, give or take its noise, or never will be."""
        losses = [each.loss for each in self.before]
        usual = max(losses) + (max(losses) - min(losses))
        back = len(self._losses) == _BACK and median(self._losses) <= usual
        return back or self._steps > _LOOKS[-1]

    @property
    def due(self) -> bool:
        """Whether it is time to look."""
        return self._steps in _LOOKS
