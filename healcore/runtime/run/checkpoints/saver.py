"""`Saver`: saves the checkpoints of a run.

    save             a checkpoint of a complete step: regular, first, last, ordered by the policy
    save_last,       at the end of a run, where a step may have begun: the state before the batches
    save_emergency   of this step were read
    save_state_as    puts the live state into the store; the other three methods end in it

A save that fails is reported and does not end the run: the checkpoint before it is still there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from healcore.console import first_of
from healcore.runtime.data import DataError
from healcore.runtime.run.checkpoints.schedule import SaveReason
from healcore.runtime.run.data_state import DATA_STATE_ITEM
from healcore.runtime.store.checkpoints import (
    CheckpointDamaged,
    CheckpointInfo,
    Keep,
    SaveFailed,
    StoreError,
    UnsavableState,
    disallowed,
    superfluous,
)
from healcore.runtime.store.ranks import run_on_first

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


MAX_CANDIDATES = 8
"""Max checkpoints on probation in a store, unless `keep` is set."""


class Saver:
    """Saves the checkpoints of one run.

    Each checkpoint has the user's state, the random states and positions of the loaders, and the
    record of the run. What comparisons of weights know is a part of the record.

    Args:
        run: the parts of the run.
        keep: the checkpoints to keep on disk, or None for those of one probation, and older ones.
    """

    def __init__(self, run: Run, keep: Keep | None) -> None:
        self.run = run
        self.resumes_exactly = run.store.durable and run.ranks.world == 1
        """Whether a run can resume exactly from a save at an exception."""
        self.unsaved: dict[int, str] = {}
        """Step whose save failed and was not repeated -> the problem."""
        per_probation = math.ceil(run.policy.rollback.probation / run.schedule.every)
        candidates = min(per_probation + 1, MAX_CANDIDATES)
        self._keep = keep or Keep(candidates=candidates, older=True)
        """The checkpoints to keep on disk."""
        self._deleted_up_to = -1
        """`RunRecord.known_good_up_to` at the last deletion. It begins with the same value, -1."""
        self._deleted: list[int] = []
        """Steps that the background has deleted since the last look."""
        self._saved_once = False
        """Whether a save of this process has succeeded, so that the state can be saved."""
        self.started_from: int | None = None
        """Step of the snapshot or checkpoint that this process started from, or None before."""
        self.newer_than_start: set[int] = set()
        """Steps of checkpoints newer than the resumed one: this process could not use them."""
        self.damage: dict[str, CheckpointDamaged] = {}
        """Path of each damaged checkpoint that this process has found -> the error."""
        self._steps: set[int] = set()
        """Steps of the checkpoints that are not abandoned."""
        self.nonfinite: dict[int, tuple[str, ...]] = {}
        """Those of this attempt with disallowed NaN or Inf, as far as known -> array names."""

    def items(self) -> dict[str, Any]:
        """Name -> item of the live state to save, except healcore's record."""
        return {**self.run.driver.state(), DATA_STATE_ITEM: self.run.data_state}

    def record_of(self, step: int) -> dict[str, Any]:
        """Healcore's record after `step` steps, as JSON-safe values."""
        return replace(
            self.run.record,
            step=step,
            world=self.run.ranks.world,
            engines=self.run.driver.engines(),
            skipped=self.run.loaders.skipped_by_source(),
            is_in_body=self.run.loop.state.is_after_step,
            last_regular=self.run.schedule.last_regular,
        ).to_dict()

    def replace_record(self, step: int) -> None:
        """Replaces the record of a checkpoint by the current record.

        The arrays of the checkpoint stay as they are. One rename replaces the file, so a process
        that is killed meanwhile leaves the old record or the new one, and never a part of one.

        Args:
            step: step of the checkpoint, which exists.
        """
        self.run.store.replace_record(step, self.record_of(step))

    def keep_random_states(self) -> None:
        """Keeps the random states after a step or an epoch, for a save at a later exception.

        By the time of an exception, the program has drawn numbers for the step that failed. A save
        with these states would repeat the step with other numbers. Does nothing in a run that
        cannot resume exactly.
        """
        if self.resumes_exactly:
            self.run.data_state.after_step()

    def keep_weight_sample(self) -> None:
        """Keeps a sample of the weights, to notice at an exception that they were replaced.

        Called after each optimizer step. An evaluation may put averaged weights in the place of the
        trained weights. If it raises, the averages must not be saved as the run's weights. Does
        nothing in a run that cannot resume exactly.
        """
        if self.resumes_exactly:
            self.run.driver.keep_weight_sample()

    def save(self, why: SaveReason) -> None:
        """Saves a checkpoint of this step, after all steps before it were read.

        Args:
            why: becomes `why` of the event `save`. FIRST and REGULAR also add an anchor.
        """
        self.run.loop.note_steps()
        with self.run.schedule.saving(why):
            step = self.run.progress.step
            if (
                why in (SaveReason.FIRST, SaveReason.REGULAR)
                and self.run.store.trainer_save is None
            ):
                # Before the save: a restart from it has to know what is learnt here.
                self.add_anchor()
            self.save_state_as(step, why)

    def add_anchor(self) -> None:
        """Adds the current weights as an anchor, with which later weights are compared.

        The checkpoints that a rollback to an anchor needs are protected from deletion, in host
        memory and on disk. An anchor whose checkpoint was deleted could lead to a verdict that no
        rollback can carry out.
        """
        step = self.run.progress.step
        self.run.witness.add_anchor(step, {*self.restorable, step})
        self.run.store.protected = self.run.witness.steps_needed

    def save_state_as(self, step: int, why: SaveReason) -> None:
        """Saves the live state as the checkpoint of `step`. Reports a failed save.

        Waits while the disk still writes the previous checkpoint. `poll` reports later errors.

        Args:
            step: steps done, or the target of a rollback.
            why: becomes `why` of the event `save`.

        Raises:
            UnsavableState: the first save found a value that cannot be saved. At a later save this
                is only reported: the run must not end because of it.
        """
        if self.run.store.trainer_save is not None:
            if why is SaveReason.ORDERED:
                self.run.store.trainer_save()
            return
        began = time.monotonic()
        try:
            self.run.store.save(step, self.items(), record=self.record_of(step))
        except (StoreError, OSError) as error:
            if isinstance(error, UnsavableState) and not self._saved_once:
                raise
            self._save_failed(step, error)
        else:
            self._saved_once = True
            self._steps.add(step)  # finite until the background has inspected it
            self.unsaved.pop(step, None)
            seconds = round(time.monotonic() - began, 6)
            self.run.log.event("save", step=step, why=why.value, seconds=seconds)
        if self.run.record.known_good_up_to > self._deleted_up_to:
            self._queue_deletions(step)

    def poll(self) -> None:
        """Reports results of the background, and computes the known-good checkpoints.

        Called once per step, and does not wait for the disk. A failed save is therefore reported
        some steps after it was ordered.
        """
        self.report_failures()
        self._remove_deleted()
        self.end_due_probation()

    def wait(self) -> None:
        """Waits until the background is done, and reports failed saves.

        A restore calls it first: the newest checkpoint may still be on its way to the disk. The
        training stands still meanwhile, so it is called only where the result is needed at once.
        """
        self.run.store.join()
        self.report_failures()

    def _remove_deleted(self) -> None:
        """Notes the deletions that have ended in the background. Does not wait."""
        while self._deleted:
            self._steps.discard(self._deleted.pop(0))

    def report_failures(self) -> None:
        """Reports failed saves, and errors for which another copy was used.

        A failed save does not end the run: the checkpoint before it is still there. A damaged copy
        is reported with a warning, because the checkpoint has one copy less than the user expects.
        """
        for error in self.run.store.take_failures():
            if isinstance(error, SaveFailed):
                self._save_failed(error.step, error)
            elif isinstance(error, CheckpointDamaged):
                self.report_damage(error)
                if error.other_copy:
                    self.run.log.warning(f"{error}; another copy was used")
                elif error.step not in self.run.store.copies:  # a rollback can restore a copy
                    self._steps.discard(error.step)
            else:
                self.run.log.problem(self.run.progress.step, str(error))

    def _save_failed(self, step: int, error: Exception) -> None:
        """Notes a failed save, with a warning."""
        if not (isinstance(error, SaveFailed) and error.elsewhere):
            if step not in self.run.store.copies:
                self._steps.discard(step)
            self.unsaved[step] = str(error)
        self.run.log.event("save_failed", step=step, problem=str(error))
        self.run.log.warning(f"checkpoint {step} was not saved: {error}")

    def _queue_deletions(self, step: int) -> None:
        """Queues the deletion of superfluous checkpoints after the save of `step`.

        Called when another checkpoint is known-good. Until then a rollback may need every
        checkpoint since the newest known-good one. The deletion is a job in the queue of the saves,
        so that the contents of a store depend on the steps, and not on the speed of a disk.

        A second rollback in the region of the last one must not use a checkpoint that became
        known-good later, so the targets there and the next older known-good one stay. The
        statuses are those of the saved records, so that a restart knows the same known-good
        checkpoints. The newest of them is verified first. If it is damaged, nothing is deleted.
        """
        store = self.run.store
        self._deleted_up_to = self.run.record.known_good_up_to
        region = self.run.policy.rollback.region
        past = self.run.ledger.same_trouble(self.run.journal.next_step, region)
        targets = [each.checkpoint for each in past]  # a start after a stop takes the oldest one
        stay = {*store.protected, *self.newer_than_start, *targets}

        def choose() -> tuple[list[CheckpointInfo], list[int]]:
            """What to delete, and the known-good steps."""
            saves = [saved for saved in store.checkpoints() if saved.path or not store.durable]
            good = [saved.step for saved in saves if saved.status == "good"]
            older = [at for at in good if targets and at < targets[-1]]
            surplus = superfluous(saves, self._keep, stay={*stay, *older[-1:]})
            return [each for each in saves if each.step in surplus], good

        def delete() -> None:
            try:
                surplus, good = run_on_first(store.ranks, choose)
                if surplus and good:
                    store.verify(good[-1])
                for old in surplus:
                    store.delete(old.step)
                # The current attempt may save an abandoned step again.
                self._deleted += [old.step for old in surplus if not old.is_abandoned]
            except Exception as error:  # what stays costs disk space, not the run
                store.report(error)

        store.submit(step, delete)

    def nonfinite_in_state(self) -> list[str]:
        """Names of the arrays in the live state with disallowed NaN or Inf on any rank, sorted.

        An array that had NaN or Inf at the start of the run, such as a mask with -Inf, may have
        them later too. Any other array with NaN or Inf is damage that a checkpoint would keep.
        """
        found = self.run.store.nonfinite_in(self.items())
        return sorted(disallowed(found, self.run.store.nonfinite_ok))

    def save_if_not_finite(self) -> None:
        """Saves weights with NaN or Inf at the end of a run, after an alarm without an order.

        The inspection of the save then finds the arrays with NaN or Inf, which leads to a rollback.
        Without it, a run that ends directly after the alarm would end with broken weights. Does
        nothing if this step is saved already, if no alarm is recent, or if gradients are
        accumulated.
        """
        due = (
            self.run.progress.step != self.run.schedule.last_saved
            and self.run.schedule.recent_alarm
        )
        if due and self.run.schedule.may_save and not self.run.driver.has_finite_weights():
            self.save(SaveReason.LAST)

    def save_last(self, *, completed: bool, after_loop: bool = False) -> None:
        """Saves the state at the end of the run.

        The program may have changed its state since the last save of this step: best weights, the
        step of a scheduler. So a loop that has ended by itself, or by a `break`, is saved in any
        case.

        Args:
            completed: whether no exception has ended the loop.
            after_loop: whether the run has ended with its loop: then a checkpoint of this step has
                its state.

        Raises:
            StoreError: the changes by batches of an unfinished step cannot be undone.
        """
        step, schedule = self.run.progress.step, self.run.schedule
        left_by_break = completed and self.run.loaders.place_of_break is not None
        if step == schedule.last_saved:
            self.wait()  # a failure of that save is reported before this one
            between_steps = not completed and not schedule.saved_in_body
            as_resumed = left_by_break and not self.run.progress.steps_taken
            if step not in self.unsaved and (after_loop or between_steps or as_resumed):
                return
        repeats_batches = self.resumes_exactly and (left_by_break or not completed)
        if not (schedule.may_save or repeats_batches):
            self.run.log.problem(
                step,
                "the run ends within an accumulation window: the gradients since the last "
                "optimizer step have changed no weights",
            )
            if not completed:
                return
        if not repeats_batches:
            self.save(SaveReason.LAST)
            return
        with self._before_batches():
            self.save(SaveReason.LAST)

    def save_emergency(self, replaced: str) -> str:
        """Saves before an exception ends the run.

        A restart resumes from this checkpoint, which has passed no probation. So it is saved only
        if nothing looks wrong.

        Args:
            replaced: the reason not to save if the program has replaced the weights, or an empty
                string.

        Returns:
            The reason why nothing was saved, or an empty string.

        Raises:
            StoreError: the changes by batches of an unfinished step cannot be undone.
        """
        self.run.loop.note_steps()
        if self.run.journal.open or self.run.schedule.recent_alarm:
            return "the last steps had an alarm"
        if not self.run.driver.has_finite_weights():
            return "the weights are not finite"
        if self.run.step_batches.within_batch:
            return "the updates on this batch have not ended"
        schedule = self.run.schedule
        if self.run.progress.step == schedule.last_saved and not schedule.saved_in_body:
            return ""
        if replaced:
            return replaced
        with self._before_batches():
            self.save(SaveReason.EMERGENCY)
        return ""

    @contextmanager
    def _before_batches(self) -> Iterator[None]:
        """A context in which a save has the state, positions and random states of the last step.

        A restart reads the batches since then again. Raises StoreError if the changes by these
        batches cannot be undone.
        """
        loaders = self.run.loaders
        pending = any(loaders.first_pending(each) is not None for each in loaders)
        in_body = loaders.last_trained is not None and loaders.last_trained.in_use
        if not self.resumes_exactly or (in_body and not pending):
            yield
            return
        obstacle = self.run.driver.undo_window()
        if obstacle:
            raise StoreError(obstacle)
        try:
            position = loaders.position(after_step=True)
        except DataError as error:
            raise StoreError(str(error)) from None
        with self.run.data_state.before_batches(position):
            yield
        if pending:
            line = "batches that were read for the next step come again after a restart"
            self.run.log.note(self.run.progress.step, line)

    # -- what is known of the checkpoints ---------------------------------------------------------

    def listed(self) -> list[CheckpointInfo]:
        """The checkpoints in the store with their statuses, as this rank sees them.

        `WayBack.listed` returns the checkpoints that all ranks see.

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
        return self._steps - self.nonfinite.keys()

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
        """Begins an attempt at a step. Called at a start and after a rollback.

        Checkpoints of later steps are abandoned, because their steps are trained again, and all
        findings so far are dropped. The next regular save is due in the interval after this step.

        Args:
            step: step of the first snapshot, of the resumed checkpoint, or of the target of a
                rollback.
        """
        self._remove_deleted()
        # No checkpoint is known-good after this step.
        self._deleted_up_to = min(self._deleted_up_to, step)
        self.run.schedule.last_saved = self.run.schedule.last_regular = step
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
        self.nonfinite = {}

    def end_due_probation(self) -> None:
        """Makes checkpoints known-good if their probation is over. Called once per step.

        No probation ends while an incident is open, because whether the weights are damaged is not
        known yet. When a probation has ended, the journal drops the steps that no rollback can ask
        for any more: without that, its list of unhealthy steps would grow for the whole run.
        """
        journal, on_probation = self.run.record.journal, self.on_probation
        if on_probation:
            steps = journal.next_step - on_probation[0]
        else:
            steps = 0
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
            if step not in self.nonfinite:
                self.run.log.event("good", step=step)

    def read_nonfinite(self) -> dict[int, tuple[str, ...]]:
        """Step -> names of arrays with disallowed NaN or Inf, of the saves of this attempt.

        Waits until the saves are inspected, and not for the disk. Reports each once.
        """
        for step, names in self.run.store.take_nonfinite():
            if step in self.nonfinite:
                continue
            problem = f"checkpoint {step} is not finite in {first_of(names)}"
            self.run.log.event("problem", step=step, problem=problem)
            if not self.nonfinite:
                self.run.log.warning(
                    f"{problem}: it can never be known-good. If NaN or Inf is expected in these "
                    "arrays, name them in nonfinite_ok"
                )
            self.nonfinite[step] = names
        return self.nonfinite

    def report_damage(self, error: CheckpointDamaged) -> None:
        """Reports a damaged checkpoint, with an event of the kind `damaged`.

        A path is reported once, because several reads may find the same damage.

        Args:
            error: the error of the read. If another copy was intact, it stays known-good.
        """
        if error.path not in self.damage:
            self.damage[error.path] = error
            intact = error.other_copy or None  # an event without the field has no other copy
            self.run.log.event("damaged", step=error.step, problem=str(error), other_copy=intact)
