"""The run's own list of its checkpoints.

A store's listing depends on the speed of its disk. Verification, deletion and quarantine use this
list instead, because they must depend on the steps alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from healcore.runtime.incidents.ledger import Ledger
from healcore.runtime.store import Keep, Saved, superfluous


class Catalog:
    """A list of the checkpoints that the training loop has submitted."""

    def __init__(self, keep: Keep, *, probation: int, region: int) -> None:
        self._keep = keep
        self._probation = probation
        self._region = region
        self._saves: dict[int, Saved] = {}
        self._surplus: set[int] = set()
        self.protected: frozenset[int] = frozenset()
        """Steps whose checkpoints are not deleted."""

    def reset(self, saves: Sequence[Saved]) -> None:
        """Replaces all entries by a store's listing."""
        self._saves = {saved.step: saved for saved in saves}
        self._surplus.clear()

    def add(self, step: int) -> None:
        """Adds a checkpoint that is being saved, as a finite candidate."""
        self._saves[step] = Saved(step, "candidate", True, 0, 0.0, True, None)
        self._surplus.discard(step)

    def remove(self, step: int) -> None:
        """Removes a checkpoint whose save has failed."""
        self._saves.pop(step, None)

    def mark_nonfinite(self, step: int) -> None:
        """Marks a checkpoint that holds NaN or Inf."""
        if step in self._saves:
            self._saves[step] = self._saves[step]._replace(status="candidate", finite=False)

    def quarantine(self, step: int) -> None:
        """Marks a checkpoint without an intact copy."""
        if step in self._saves:
            self._saves[step] = self._saves[step]._replace(status="quarantined")

    def mark_deleted(self, steps: set[int]) -> None:
        """Removes deleted checkpoints from the surplus."""
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
        """Step of the newest finite checkpoint before `step`, or 0."""
        finite = [s.step for s in self._saves.values() if s.finite and s.step < step]
        return max(finite, default=0)

    def probation_passed(self, ledger: Ledger, before: int | None = None) -> list[int]:
        """Steps of checkpoints whose probation is over now, or at step `before`."""
        now = ledger.next_step if before is None else min(before, ledger.next_step)
        saves = [self._saves[step] for step in self.on_probation]
        if not saves or now - saves[0].step < self._probation:
            return []
        return probation_passed(
            saves, unhealthy=ledger.unhealthy, now=now, probation=self._probation
        )

    def mark_good(self, steps: Sequence[int], ledger: Ledger) -> list[int]:
        """Marks checkpoints known-good; returns the steps to delete after their verification."""
        for step in steps:
            self._saves[step] = self._saves[step]._replace(status="good")
        for step in self._superfluous(ledger):
            del self._saves[step]
            self._surplus.add(step)
        return sorted(self._surplus)

    def _superfluous(self, ledger: Ledger) -> list[int]:
        """Steps of the checkpoints to delete.

        Within the region of the last rollback, its target and the next older known-good checkpoint
        stay: a second rollback there must not use a checkpoint that became known-good later.
        """
        saves, stay = list(self._saves.values()), set(self.protected)
        last = ledger.same_trouble(ledger.next_step, self._region)[-1:]
        if last:
            target = last[0].target
            older = sorted(s.step for s in saves if s.status == "good" and s.step < target)
            stay |= {target, *older[-1:]}
        return [step for step in superfluous(saves, self._keep) if step not in stay]


def probation_passed(
    saves: Sequence[Saved], *, unhealthy: Iterable[int], now: int, probation: int
) -> list[int]:
    """Steps of candidates with at least `probation` healthy steps between them and step `now`.

    Unhealthy steps are not counted, but do not restart the count: otherwise no checkpoint would
    become known-good in a run that skips a bad batch now and then.
    """
    bad = sorted(unhealthy)

    def healthy(step: int) -> int:
        return now - step - (bisect_left(bad, now) - bisect_left(bad, step))

    return [
        save.step
        for save in saves
        if save.status == "candidate" and save.finite and healthy(save.step) >= probation
    ]
