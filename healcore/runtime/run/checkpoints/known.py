"""`KnownCheckpoints`: which checkpoints of a run are finite, damaged or known-good.

A checkpoint is known-good if it is finite, not abandoned, and followed by `probation` healthy
steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

from healcore.console import first_of
from healcore.runtime.store.checkpoints import CheckpointDamaged, CheckpointInfo

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


class KnownCheckpoints:
    """What this process knows about the checkpoints of its run.

    It knows for each checkpoint whether its arrays are finite, whether it is damaged, and whether
    its probation is over. A rollback chooses among the checkpoints by these facts without reading
    the disk. The facts are of the current attempt: a rollback abandons the checkpoints of later
    steps.

    Args:
        run: the parts of the run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.started_from: int | None = None
        """Step of the snapshot or checkpoint that this process started from, or None before."""
        self.newer_than_start: set[int] = set()
        """Steps of checkpoints newer than the resumed one: this process could not use them."""
        self.damage: dict[tuple[str, bool], CheckpointDamaged] = {}
        """Path of each damaged checkpoint that this process has found, and whether another copy was
        intact then -> the error."""
        self.nonfinite: list[tuple[int, tuple[str, ...]]] = []
        """Step and array names of each checkpoint of this process with disallowed NaN or Inf."""
        self._steps: set[int] = set()
        """Steps of the checkpoints that are not abandoned."""
        self._bad: dict[int, tuple[str, ...]] = {}
        """Those of this attempt with disallowed NaN or Inf, as far as known -> array names."""

    def listed(self) -> list[CheckpointInfo]:
        """The checkpoints in the store with their statuses, as this rank sees them.

        `StoredCheckpoints.listed` returns the checkpoints that all ranks see.

        Raises:
            StoreError: the store cannot be read.
        """
        return self.run.record.attempt_history.with_status(self.run.store.checkpoints())

    @property
    def restorable(self) -> set[int]:
        """Steps of the checkpoints that a rollback could restore.

        A checkpoint is among them while it is saved and inspected, because most saves turn out to
        be finite. It leaves the set when NaN or Inf, or damage, is found in it.
        """
        return self._steps - self._bad.keys()

    @property
    def last_good_step(self) -> int | None:
        """Step of the newest known-good checkpoint, or None if there is none.

        There is none until the first probation of the run is over. A rollback lowers the value to
        at most the step that it has restored: what was known about later checkpoints belongs to
        undone steps.
        """
        last = self.run.record.known_good_up_to
        return max((at for at in self.restorable if at <= last), default=None)

    @property
    def on_probation(self) -> list[int]:
        """Steps of the checkpoints whose probation is not over, ascending.

        Such a checkpoint is newer than the newest known-good one, and may hold damage that has not
        shown yet. It becomes known-good after `[rollback] probation` healthy steps.
        """
        last = self.run.record.known_good_up_to
        return sorted(at for at in self._steps if at > last)

    def begin_attempt(self, step: int) -> None:
        """Begins an attempt at a step. Checkpoints of later steps are abandoned.

        Drops all findings so far, because their steps are repeated.

        Args:
            step: step of the first snapshot, of the resumed checkpoint, or of the target of a
                rollback.
        """
        record = self.run.record
        self.run.store.take_nonfinite()
        if self.started_from is None:
            self.started_from = step
            saves = [each for each in self.listed() if not each.is_abandoned]
            self.newer_than_start = {each.step for each in saves if each.step > step}
            self._steps = {each.step for each in saves if each.finite}
        record.attempts.append(step)
        record.known_good_up_to = min(record.known_good_up_to, step)
        self._steps = {at for at in self.restorable if at <= step}
        self._bad = {}

    def add(self, step: int) -> None:
        """Adds a checkpoint that is being saved.

        It counts as finite until the background has inspected it, so that a rollback that is
        ordered in the meantime may use it.

        Args:
            step: step of the checkpoint.
        """
        self._steps.add(step)

    def remove(self, steps: Collection[int]) -> None:
        """Removes deleted or lost checkpoints.

        A rollback then does not try to restore them. The steps of unknown checkpoints are ignored.

        Args:
            steps: steps of the checkpoints.
        """
        self._steps.difference_update(steps)

    def end_due_probation(self) -> None:
        """Makes checkpoints known-good if their probation is over. Called once per step.

        No probation ends while an incident is open, because whether the weights are damaged is not
        known yet. When a probation has ended, the journal drops the steps that no rollback can ask
        for any more: without that, its list of unhealthy steps would grow for the whole run.
        """
        journal, on_probation = self.run.record.journal, self.on_probation
        steps = journal.next_step - on_probation[0] if on_probation else 0
        if steps >= self.run.policy.rollback.probation and not journal.open:
            self.end_probation()
            # A rollback needs the steps since the newest known-good checkpoint.
            journal.drop_before(min([self.last_good_step or 0, *self.on_probation]))

    def end_probation(self, *, before: float = math.inf) -> None:
        """Makes the checkpoints known-good whose probation was over before a step.

        Args:
            before: only healthy steps before this one count. A rollback passes the onset of its
                trouble.
        """
        journal, probation = self.run.record.journal, self.run.policy.rollback.probation
        for step in self.on_probation:
            if journal.healthy_steps(step, int(min(before, journal.next_step))) < probation:
                break
            self.run.record.known_good_up_to = step
            self.read_nonfinite()
            if step not in self._bad:
                self.run.log.event("good", step=step)

    def read_nonfinite(self) -> dict[int, tuple[str, ...]]:
        """Step -> names of arrays with disallowed NaN or Inf, of the saves of this attempt.

        Waits until the saves are inspected, and not for the disk. Reports each once.
        """
        for step, names in self.run.store.take_nonfinite():
            if step in self._bad:
                continue
            self._bad[step] = names
            problem = f"checkpoint {step} is not finite in {first_of(names)}"
            self.run.log.event("problem", step=step, problem=problem)
            if not self.nonfinite:
                self.run.log.warning(
                    f"{problem}: it can never be known-good. If NaN or Inf is expected in these "
                    "arrays, name them in nonfinite_ok"
                )
            self.nonfinite.append((step, names))
        return self._bad

    def report_damage(self, error: CheckpointDamaged) -> None:
        """Reports a damaged checkpoint, with an event of the kind `damaged`.

        A path is reported once, because several reads may find the same damage, and once more if
        its other copy is damaged too.

        Args:
            error: the error of the read. If another copy was intact, it stays known-good.
        """
        key = error.path, error.other_copy
        if key not in self.damage:
            self.damage[key] = error
            intact = error.other_copy or None  # an event without the field has no other copy
            self.run.log.event("damaged", step=error.step, problem=str(error), other_copy=intact)
