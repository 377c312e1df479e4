"""A stretch of bad data, seen when it is over: the loss was high, and has come back with the data.

While it lasts a bad shard cannot be told from a new domain: the loss jumps at once, the model is
what it was. Afterwards it can. New data stay, or they have been learnt; a shard of wrong labels
ends, was never learnt, and has left a damaged model behind:

1. the loss rose at once by several times its noise and stayed up for `_SHORTEST` to `_LONGEST`
   steps;
2. it came back below half of the mean rise: its end, or a model that has unlearned so much that
   what is left of the stretch shows only when it is taken again;
3. at its end it was still not below what it was before anything was learnt (the first losses);
4. batches from before are worse now than they were, by a real part of the rise.

Only then is it worth going back to before the stretch and leaving it out. Without the fourth there
is nothing to repair, and it can only be asked with a `loss_fn`.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

_FIRST = 4  # steps whose mean loss is what an untrained model has
_BEFORE = 32  # losses that the level and its noise are taken from
_RISE = 8.0  # mean absolute deviations of the loss that the first step of a stretch stands above it
_SHORTEST, _LONGEST = 6, 128
_BACK = 0.5  # of the rise: below it the loss has come back
_UNLEARNT = 0.9  # of the untrained loss: below it the model was learning what it saw


class Stretch(NamedTuple):
    """High losses from one step to another."""

    onset: int
    """Index of the first step."""
    end: int
    """Index of the last one."""
    rise: float
    """Of the mean loss above the level before."""


class Excursions:
    """Looks for such a stretch; takes one loss after another."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._level: deque[float] = deque(maxlen=_BEFORE)
        self._high: list[float] = []
        self._onset = 0

    def restart(self) -> None:
        """Steps are taken again, or the data have changed: only the untrained loss is kept."""
        self._level.clear()
        self._high.clear()

    def resumed(self) -> None:
        """The run had begun before: what an untrained model has is not known."""
        self._first = [-math.inf] * _FIRST

    @property
    def under_way(self) -> bool:
        """Whether the last loss was high."""
        return bool(self._high)

    def see(self, index: int, loss: float) -> Stretch | None:
        """Takes the loss of one step; the stretch that this step is the first one after, if any."""
        if len(self._first) < _FIRST:
            self._first.append(loss)
        if len(self._level) < _BEFORE:
            self._level.append(loss)
            return None
        level = sum(self._level) / _BEFORE
        noise = sum(abs(each - level) for each in self._level) / _BEFORE
        if not self._high:
            if loss - level > _RISE * noise:
                self._onset = index
                self._high.append(loss)
            else:
                self._level.append(loss)
            return None
        rise = sum(self._high) / len(self._high) - level
        if loss - level > _BACK * rise:
            self._high.append(loss)
            if len(self._high) > _LONGEST:
                self.restart()  # these are the data from now on
            return None
        high, self._high = self._high, []
        untrained = sum(self._first) / len(self._first)
        last = high[-max(len(high) // 4, 1) :]
        if len(high) < _SHORTEST or sum(last) / len(last) < _UNLEARNT * untrained:
            return None
        return Stretch(self._onset, index - 1, rise)
