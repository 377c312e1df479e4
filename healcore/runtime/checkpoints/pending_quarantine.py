"""Checkpoints that are to be quarantined as soon as the disk can be written again.

A rollback quarantines what was saved after the trouble began. Where the disk cannot be written, or
is gone for the moment, those checkpoints would be there again, as if nothing had happened, as soon
as it is back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from healcore.runtime.store import Saved, StoreError
from healcore.runtime.store.ranks import Alone, Ranks, agreed


class _Branch(NamedTuple):
    target: int
    """Step that the run went back to."""
    before: float
    """Wall-clock seconds. What was saved later is of the branch that goes on."""


class PendingQuarantine:
    """What is still to be quarantined on disk."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._branches: list[_Branch] = []

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return bool(self._branches)

    def add(self, target: int) -> None:
        """Everything on disk of a step after `target`, up to now. On every rank together."""
        self._branches.append(_Branch(target, agreed(self._ranks, time.time())))

    def applied(self, saves: Sequence[Saved]) -> list[Saved]:
        """A listing as it would be if all of it were quarantined on disk."""
        return [
            saved._replace(status="quarantined") if self._names(saved) else saved for saved in saves
        ]

    def settle(self, tier: Any) -> list[int]:
        """Quarantines it; the steps that were. Nothing happens while the disk is gone."""
        branches = list(self._branches)
        try:
            saves = tier.steps()
        except StoreError:
            saves = None
        todo = saves and [s.step for s in saves if self._names(s) and s.status != "quarantined"]
        todo = agreed(getattr(tier, "processes", None) or Alone(), todo)
        if todo is None:
            return []
        try:
            for step in todo:
                tier.mark(step, "quarantined")
        except (StoreError, OSError):
            return []
        self._branches = [each for each in self._branches if each not in branches]
        return todo

    def _names(self, saved: Saved) -> bool:
        return any(saved.step > at.target and saved.created < at.before for at in self._branches)
