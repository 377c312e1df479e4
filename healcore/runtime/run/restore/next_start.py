"""`NextStarts`: makes the next start resume from an earlier checkpoint than the newest one.

Usually the next start resumes from the newest checkpoint, and nothing here is called. It begins
earlier in two cases:

    `after_stop`     the run has stopped, so what was tried for its trouble has not helped: the
                     start takes the oldest snapshot that was restored, with the envelope from
                     before these tries
    `repeat_from`    the loop took steps that the Healer has not seen
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from healcore.runtime.run.run_record import NextStart
from healcore.runtime.store.checkpoints import StoreError

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


class NextStarts:
    """Writes `RunRecord.next_start` at the end of a run. Collective."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def after_stop(self, onset: int, *, repeats_skips: bool) -> None:
        """Lets the next start take the oldest snapshot that was restored for the trouble of a stop.

        If the record cannot be written, the log says so, because the run stops all the same.

        Args:
            onset: step at which the trouble begins.
            repeats_skips: whether the next start repeats the steps since the first skipped step,
                also if no rollback was tried for them.
        """
        run = self.run
        if run.store.trainer_save is not None:
            return
        tries = run.ledger.same_trouble(onset, run.policy.rollback.probation)
        which = "the oldest one that a rollback has restored"
        start = None
        try:
            run.saver.wait()
            if tries:
                oldest = min(each.checkpoint for each in tries)
                start = NextStart(oldest, tries[0].before, len(tries))
            elif repeats_skips:
                which = "the newest one before the first skipped step"
                first_skip = next(iter(run.journal.unhealthy), run.progress.step)
                start = self._newest(before=first_skip + 1)
            if start is None:
                return
            self._write(start)
            if run.store.durable:
                run.log.info(
                    f"the next start resumes from the checkpoint of step {start.step}, {which}: "
                    "mend the program, and start it again"
                )
        except (StoreError, OSError) as error:
            problem = f"the stop could not be written: {error}; a restart begins with the limits"
            run.log.problem(run.progress.step, f"{problem} and the skipped batches of today")

    def repeat_from(self, *, before: int) -> int | None:
        """Makes the next start resume from the newest checkpoint before a step.

        Args:
            before: steps from here on are repeated.

        Returns:
            The step of the checkpoint, or None if the next start resumes from the newest one.
        """
        start = None
        try:
            if self.run.store.trainer_save is None:
                start = self._newest(before=before)
            if start is not None:
                self._write(start)
        except (StoreError, OSError):
            return None
        return start.step if start is not None else None

    def _newest(self, *, before: int) -> NextStart | None:
        """A start from the newest usable checkpoint before a step, or None without one."""
        steps = []
        for saved in self.run.known_checkpoints.listed():
            if saved.step < before and saved.is_usable:
                steps.append(saved.step)
        if not steps:
            return None
        return NextStart(max(steps), self.run.holding.envelope)

    def _write(self, start: NextStart) -> None:
        """Writes the start into the newest record.

        One rename replaces the record, so a process that is killed meanwhile leaves either the run
        before the stop, which finds the trouble again, or the stopped run.
        """
        newest = self.run.stored_checkpoints.newest_record()
        if newest is not None:
            marked = replace(newest, next_start=start)
            self.run.store.replace_record(newest.step, marked.to_dict())
