"""`NextStart`: decides, at the end of a run, whether the next start resumes from an earlier step.

Usually the next start resumes from the newest checkpoint, and nothing here is called. It begins
earlier in two cases:

    `mark_failed_trials`    the run has stopped, so what its rollbacks have changed has not helped
    `repeat_from`           the loop took steps that the Healer has not seen

Both mark trials as failed in the newest record (`RunRecord.trials`), and the start undoes them
(`trials.py`). In the second case the trials have changed nothing, so only the steps are repeated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from healcore.runtime.run.record.run_record import Trials
from healcore.runtime.run.restore.trials import in_force_now
from healcore.runtime.store.checkpoints import StoreError

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


class NextStart:
    """Makes the next start resume from an earlier checkpoint than the newest one."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def mark_failed_trials(self, onset: int, *, repeats_skips: bool) -> None:
        """Marks the trials for the trouble of a stop as failed. Collective.

        If the record cannot be written, the log says so, because the run stops all the same.

        Args:
            onset: step at which the trouble begins.
            repeats_skips: whether the next start repeats the steps since the first skipped step,
                also if no rollback was tried for them.
        """
        if self.run.store.trainer_save is not None:
            return
        trials = self.run.record.trials_for(onset, self.run.policy.rollback.probation)
        which = "the oldest one that a rollback has restored"
        try:
            self.run.saver.wait()
            if trials is None and repeats_skips:
                which = "the newest one before the first skipped step"
                first_skip = next(iter(self.run.ledger.unhealthy), self.run.progress.step)
                trials = self._no_trials(before=first_skip + 1)
            if trials is None:
                return
            self._mark_failed(trials)
            if self.run.store.durable:
                self.run.log.info(
                    f"the next start resumes from the checkpoint of step {trials.oldest}, {which}: "
                    "mend the program, and start it again"
                )
        except (StoreError, OSError) as error:
            problem = f"the stop could not be written: {error}; a restart begins with the limits"
            self.run.log.problem(
                self.run.progress.step, f"{problem} and the skipped batches of today"
            )

    def repeat_from(self, *, before: int) -> int | None:
        """Makes the next start resume from the newest checkpoint before a step. Collective.

        Args:
            before: steps from here on are repeated.

        Returns:
            The step of the checkpoint, or None if the next start resumes from the newest one.
        """
        if self.run.store.trainer_save is not None:
            return None
        trials = self._no_trials(before=before)
        if trials is None:
            return None
        try:
            self._mark_failed(trials)
        except (StoreError, OSError):
            return None
        return trials.oldest

    def _no_trials(self, *, before: int) -> Trials | None:
        """Trials that have changed nothing, for a start from the newest checkpoint before a step.

        Args:
            before: steps from here on are repeated.

        Returns:
            The trials, or None without such a checkpoint or if the store cannot be read.
        """
        steps: list[int] = []
        try:
            for saved in self.run.known_checkpoints.listed():
                if saved.step < before and saved.is_usable:
                    steps.append(saved.step)
        except StoreError:
            return None
        if not steps:
            return None
        return in_force_now(self.run, oldest=max(steps), engines={})

    def _mark_failed(self, trials: Trials) -> None:
        """Marks trials as failed in the newest record: the next start undoes them. Collective.

        One rename replaces the record, so a process that is killed meanwhile leaves either the run
        before the stop, which finds the trouble again, or the stopped run.

        Args:
            trials: what was in force before the trials.

        Raises:
            StoreError: the record cannot be written.
        """
        newest = self.run.stored_checkpoints.newest_record()
        if newest is not None:
            marked = replace(newest, trials=replace(trials, failed=True))
            self.run.store.replace_record(newest.step, marked.to_dict())
