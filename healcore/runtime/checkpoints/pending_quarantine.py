"""Checkpoints that are quarantined on disk as soon as the disk can be written again.

A rollback quarantines what was saved after the onset. If the disk cannot be written or is gone at
that moment, those checkpoints would count as usable once it is back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from healcore.runtime.store import Saved, StoreError
from healcore.runtime.store.ranks import Alone, Ranks, agreed


class _AbandonedBranch(NamedTuple):
    target: int
    """Step of the checkpoint that the run went back to."""
    before: float
    """Wall-clock seconds. Checkpoints saved later belong to the branch that continues."""


class PendingQuarantine:
    """What is still to be quarantined on disk."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._branches: list[_AbandonedBranch] = []

    def __bool__(self) -> bool:
        """Whether anything is pending."""
        return bool(self._branches)

    def add(self, target: int) -> None:
        """Adds every checkpoint after `target` that was saved until now. Collective."""
        self._branches.append(_AbandonedBranch(target, agreed(self._ranks, time.time())))

    def applied(self, saves: Sequence[Saved]) -> list[Saved]:
        """A listing as if everything pending were quarantined on disk."""
        return [
            saved._replace(status="quarantined") if self._includes(saved) else saved
            for saved in saves
        ]

    def write(self, tier: Any) -> list[int]:
        """Quarantines on disk; the steps that were. Does nothing while the disk is gone."""
        branches = list(self._branches)
        try:
            saves = tier.steps()
        except StoreError:
            saves = None
        todo = saves and [s.step for s in saves if self._includes(s) and s.status != "quarantined"]
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

    def _includes(self, saved: Saved) -> bool:
        return any(saved.step > at.target and saved.created < at.before for at in self._branches)
