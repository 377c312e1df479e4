"""What a run knows about its checkpoints, without asking the disk.

A store's own listing depends on the speed of its disk. What is verified next, what may be deleted
and what counts as quarantined has to depend on the steps alone.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from healcore.runtime.recovery.ledger import Ledger
from healcore.runtime.store import CheckpointStore, Keep, Saved, StoreError, superfluous
from healcore.runtime.store.ranks import Ranks, agreed


class Catalog:
    """One entry per checkpoint that the training loop has submitted."""

    def __init__(self, keep: Keep, *, probation: int, region: int) -> None:
        self._keep = keep
        self._probation = probation
        self._region = region
        self._saves: dict[int, Saved] = {}
        self._surplus: set[int] = set()
        self.protected: frozenset[int] = frozenset()
        """Steps of checkpoints that are not deleted."""

    def reset(self, saves: Sequence[Saved]) -> None:
        """Replaces all entries by a store's listing."""
        self._saves = {saved.step: saved for saved in saves}
        self._surplus.clear()

    def add(self, step: int) -> None:
        """Adds a checkpoint that is being saved. The background finds out whether it is finite."""
        self._saves[step] = Saved(step, "candidate", True, 0, 0.0, True, None)
        self._surplus.discard(step)

    def remove(self, step: int) -> None:
        """Removes a checkpoint whose save has failed."""
        self._saves.pop(step, None)

    def mark_nonfinite(self, step: int) -> None:
        """Excludes a checkpoint with NaN or Inf from ever being known-good."""
        if step in self._saves:
            self._saves[step] = self._saves[step]._replace(status="candidate", finite=False)

    def quarantine(self, step: int) -> None:
        """Marks a checkpoint that has no intact copy."""
        if step in self._saves:
            self._saves[step] = self._saves[step]._replace(status="quarantined")

    def mark_deleted(self, steps: set[int]) -> None:
        """Drops deleted checkpoints from the surplus."""
        self._surplus -= steps

    def __contains__(self, step: int) -> bool:
        """Whether a rollback could restore the checkpoint of a step."""
        saved = self._saves.get(step)
        return saved is not None and saved.finite and saved.status != "quarantined"

    @property
    def on_probation(self) -> list[int]:
        """Steps of the checkpoints on probation, ascending."""
        saves = self._saves.values()
        return sorted(s.step for s in saves if s.status == "candidate" and s.finite)

    def newest_finite_before(self, step: int) -> int:
        """Step of the newest checkpoint before `step` that is not known to be bad; 0 if none."""
        finite = [s.step for s in self._saves.values() if s.finite and s.step < step]
        return max(finite, default=0)

    def probation_passed(self, ledger: Ledger, before: int | None = None) -> list[int]:
        """Steps of the checkpoints whose probation is over now, or was over by step `before`."""
        now = ledger.next_step if before is None else min(before, ledger.next_step)
        saves = [self._saves[step] for step in self.on_probation]
        return probation_passed(
            saves, unhealthy=ledger.unhealthy, now=now, probation=self._probation
        )

    def mark_good(self, steps: Sequence[int], ledger: Ledger) -> list[int]:
        """Treats checkpoints as known-good; returns the steps to delete once these are verified."""
        for step in steps:
            self._saves[step] = self._saves[step]._replace(status="good")
        for step in self._superfluous(ledger):
            del self._saves[step]
            self._surplus.add(step)
        return sorted(self._surplus)

    def _superfluous(self, ledger: Ledger) -> list[int]:
        """Checkpoints that need not be kept.

        Within the region of the last rollback its target and the next older known-good one stay, so
        that a second rollback there does not go to one that has become known-good since.
        """
        saves, stay = list(self._saves.values()), set(self.protected)
        last = ledger.same_trouble(ledger.next_step, self._region)[-1:]
        if last:
            target = last[0].target
            good = sorted(s.step for s in saves if s.status == "good" and s.step < target)
            stay |= {target, *good[-1:]}
        return [step for step in superfluous(saves, self._keep) if step not in stay]


def probation_passed(
    saves: Sequence[Saved], *, unhealthy: Iterable[int], now: int, probation: int
) -> list[int]:
    """Candidates that `probation` healthy steps have followed, of `now` steps recorded.

    Unhealthy steps are not counted and do not restart the count. Otherwise no checkpoint would
    become known-good in a run where a bad batch is skipped now and then.
    """
    bad = sorted(unhealthy)

    def healthy(step: int) -> int:
        return now - step - (bisect_left(bad, now) - bisect_left(bad, step))

    return [
        save.step
        for save in saves
        if save.status == "candidate" and save.finite and healthy(save.step) >= probation
    ]


class _AbandonedBranch(NamedTuple):
    target: int
    """Step of the checkpoint that the run went back to."""
    before: float
    """Wall-clock seconds. Checkpoints saved later belong to the branch that continues."""


class PendingQuarantine:
    """Checkpoints to quarantine as soon as the disk can be written again.

    A rollback quarantines what was saved after the onset. If the disk cannot be written at that
    moment, those checkpoints would count as usable later.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._branches: list[_AbandonedBranch] = []

    def __bool__(self) -> bool:
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

    def write(self, tier: CheckpointStore) -> list[int]:
        """Quarantines on disk and returns the steps; does nothing while the disk cannot be used."""
        branches = list(self._branches)
        try:
            saves = tier.steps()
        except StoreError:
            saves = None
        todo = saves and [s.step for s in saves if self._includes(s) and s.status != "quarantined"]
        todo = agreed(tier.processes, todo)
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
