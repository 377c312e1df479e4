"""Which checkpoints there are by the steps, however far a disk has come with writing them.

What is on probation, what is proven next and what may be deleted is read from here. So it follows
from the steps alone; a store that is asked instead answers by how fast its disk is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from healcore.runtime.ledger import Ledger
from healcore.runtime.store import Keep, Saved, superfluous


class Catalog:
    """One entry per checkpoint.

    Args:
        keep: how many of each kind stay.
        probation: healthy steps until one is known-good.
        region: steps within which trouble is the same trouble.
    """

    def __init__(self, keep: Keep, *, probation: int, region: int) -> None:
        self._keep = keep
        self._probation = probation
        self._region = region
        self._saves: dict[int, Saved] = {}
        self._surplus: set[int] = set()

    def read(self, saves: Sequence[Saved]) -> None:
        """Starts over, from what a store lists."""
        self._saves = {saved.step: saved for saved in saves}
        self._surplus.clear()

    def saved(self, step: int) -> None:
        """A checkpoint is on its way; whether it is finite is found in the background."""
        self._saves[step] = Saved(step, "candidate", True, 0, 0.0, True, None)
        self._surplus.discard(step)

    def failed(self, step: int) -> None:
        """It did not arrive."""
        self._saves.pop(step, None)

    def not_finite(self, step: int) -> None:
        """It can never be known-good."""
        if step in self._saves:
            self._saves[step] = self._saves[step]._replace(status="candidate", finite=False)

    def damaged(self, step: int) -> None:
        """No copy of it is intact."""
        if step in self._saves:
            self._saves[step] = self._saves[step]._replace(status="quarantined")

    def deleted(self, steps: set[int]) -> None:
        """They are not in the store any more."""
        self._surplus -= steps

    @property
    def waiting(self) -> list[int]:
        """Steps of the checkpoints on probation, ascending."""
        saves = self._saves.values()
        return sorted(s.step for s in saves if s.status == "candidate" and s.finite)

    def finite_before(self, step: int) -> int:
        """Step of the newest checkpoint before `step` that is not known to be bad; 0: none."""
        fine = [s.step for s in self._saves.values() if s.finite and s.step < step]
        return max(fine, default=0)

    def ready(self, ledger: Ledger, before: int | None = None) -> list[int]:
        """Steps whose probation is over; with `before`, was over by that step."""
        now = ledger.judged if before is None else min(before, ledger.judged)
        facts = {"unhealthy": ledger.unhealthy, "now": now, "probation": self._probation}
        return proven([self._saves[step] for step in self.waiting], **facts)

    def prove(self, ready: Sequence[int], ledger: Ledger) -> list[int]:
        """They are as good as good from now on.

        Returns:
            What may be deleted then, that asked for before and not done yet included.
        """
        for step in ready:
            self._saves[step] = self._saves[step]._replace(status="good")
        for step in self._superfluous(ledger):
            del self._saves[step]
            self._surplus.add(step)
        return sorted(self._surplus)

    def _superfluous(self, ledger: Ledger) -> list[int]:
        """What need not be kept.

        While the region of the last rollback lasts, where it went and the next one deeper stay: a
        second one in the same region goes there, and not to what became good on the way.
        """
        saves, stay = list(self._saves.values()), set()
        last = ledger.earlier[-1] if ledger.earlier else None
        if last is not None and ledger.judged < last.onset + self._region:
            good = sorted(s.step for s in saves if s.status == "good" and s.step < last.target)
            stay = {last.target, *good[-1:]}
        return [step for step in superfluous(saves, self._keep) if step not in stay]


def proven(
    saves: Sequence[Saved], *, unhealthy: Iterable[int], now: int, probation: int
) -> list[int]:
    """Candidates that `probation` healthy steps have followed: to be verified and marked good.

    They need not follow without a gap: in a run with a bad batch now and then, each skipped, no
    checkpoint would ever be known-good. An unhealthy step is just not counted.

    Args:
        saves: the checkpoints.
        unhealthy: indices of steps with an alarm.
        now: steps judged.
        probation: how many healthy steps it takes.
    """
    bad = sorted(unhealthy)

    def healthy(step: int) -> int:
        return now - step - (bisect_left(bad, now) - bisect_left(bad, step))

    return [
        save.step
        for save in saves
        if save.status == "candidate" and save.finite and healthy(save.step) >= probation
    ]
