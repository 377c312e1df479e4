"""`Saver`: saves the checkpoints of a run.

`save` is for a step that is complete: regular, first, last or ordered by the policy. `write` puts
the live state into the store without any further thought. `save_last` and `save_emergency` are for
the end of a run, where a step may have begun: they save the state before its batches were read.

The `Deleter` deletes checkpoints that are not needed any more, in the queue of the saves. So the
contents of a store depend on the steps, and not on the speed of a disk.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from healcore.runtime.run.checkpoints.storage_need import (
    StorageNeed,
    checkpoints_on_disk,
    copies_in_memory,
)
from healcore.runtime.run.compare.saved_form import MAX_BATCH_BYTES
from healcore.runtime.run.host_state import HOST_ITEM
from healcore.runtime.store.checkpoints import (
    AttemptHistory,
    CheckpointDamaged,
    CheckpointNotFound,
    Keep,
    SaveFailed,
    StoreError,
    UnsavableState,
    disallowed,
    superfluous,
)
from healcore.runtime.store.ranks import run_on_first
from healcore.runtime.store.store import CheckpointStore

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


class SaveReason(StrEnum):
    """Why a checkpoint is saved. The event `save` has the value."""

    FIRST = "first"
    """The snapshot before the first step."""
    REGULAR = "regular"
    """The schedule says so."""
    ORDERED = "ordered"
    """A rule of the policy or a hook says so. Where a trainer saves, the trainer is told to."""
    REQUESTED = "requested"
    """The program has called `Healer.save`."""
    ROLLBACK = "rollback"
    """The target of a rollback is not on disk as it was restored."""
    LAST = "last"
    """The run ends."""
    EMERGENCY = "emergency"
    """An exception ends the run."""

    @property
    def adds_anchor(self) -> bool:
        """Whether later weights are compared with the weights of this checkpoint."""
        return self in (SaveReason.FIRST, SaveReason.REGULAR)


class Saver:
    """Saves the checkpoints of one run.

    Each checkpoint has the user's state, the random states and positions of the loaders, and the
    record of the run. What comparisons of weights know is a part of the record.

    Args:
        run: the parts of the run.
        keep: the checkpoints to keep on disk, or None for the default.
    """

    def __init__(self, run: Run, keep: Keep | None) -> None:
        self.run = run
        if run.store.arrays_by_rank:
            run.data.host.pack_batches = run.comparisons.batches_to_save
        self.resumes_exactly = run.store.durable and run.ranks.world == 1
        """Whether a run can resume exactly from a save at an exception."""
        self.unsaved: dict[int, str] = {}
        """Step whose save failed and was not repeated -> the problem."""
        self._deleter = Deleter(run, keep)
        self._failures = 0
        self._saved_once = False

    def items(self) -> dict[str, Any]:
        """Name -> item of the live state to save, except healcore's record."""
        return {**self.run.driver.state(), HOST_ITEM: self.run.data.host}

    def storage_need(self) -> StorageNeed:
        """The bytes that the checkpoints of this run need. Every rank calls it.

        Returns:
            The need, for the first line of the run: a full disk in the night costs more than a
            look at this number.

        Raises:
            StoreError: the state cannot be saved.
        """
        host = self.run.data.host
        pack_batches, host.pack_batches = host.pack_batches, lambda: None  # they are named apart
        try:
            whole, local = self.run.store.format.sizes(self.items())
        finally:
            host.pack_batches = pack_batches
        missing = self.run.driver.missing_moments()
        more_whole, more_local = 0, 0
        if missing is not None:
            more_whole, more_local = missing
        keep, compares = self._deleter.keep, self.run.comparisons.is_enabled
        return StorageNeed(
            whole + more_whole,
            local + more_local,
            checkpoints_on_disk(keep, compares=compares),
            copies_in_memory(self.run.store.ring.keep, compares=compares),
            older=keep.older,
            at_least=missing is None,
            directories=self.run.store.directories,
            batches=MAX_BATCH_BYTES if compares and self.run.store.arrays_by_rank else 0,
        )

    def record_of(self, step: int) -> dict[str, Any]:
        """Healcore's record after `step` steps, as JSON-safe values."""
        comparisons = self.run.comparisons
        return replace(
            self.run.record,
            step=step,
            world=self.run.ranks.world,
            engines=self.run.driver.engines(),
            skipped=self.run.loaders.skipped_by_loader(),
            forward=self.run.loaders.forward_positions(),
            comparisons=comparisons.to_save() if comparisons.is_enabled else None,
        ).to_dict()

    def replace_record(self, step: int) -> None:
        """Replaces the record of a checkpoint by the current record.

        The arrays of the checkpoint stay as they are. One rename replaces the file, so a process
        that is killed meanwhile leaves the old record or the new one, and never a part of one.

        Args:
            step: step of the checkpoint, which exists.
        """
        self.run.store.replace_record(step, self.record_of(step))

    def begin_attempt(self, step: int) -> None:
        """Begins an attempt at a step. Called at a start and after a rollback.

        Checkpoints of later steps are abandoned, because their steps are trained again. The next
        regular save is due one interval after this step.

        Args:
            step: first step of the attempt.
        """
        self._deleter.begin_attempt(step)
        self.run.known.begin_attempt(step)
        self.run.schedule.last_saved = step

    def keep_random_states(self) -> None:
        """Keeps the random states after a step or an epoch, for a save at a later exception.

        By the time of an exception, the program has drawn numbers for the step that failed. A save
        with these states would repeat the step with other numbers. Does nothing in a run that
        cannot resume exactly.
        """
        if self.resumes_exactly:
            self.run.data.host.after_step()

    def keep_weight_sample(self) -> None:
        """Keeps a sample of the weights, to notice at an exception that they were replaced.

        Called after each optimizer step. An evaluation may put averaged weights in the place of the
        trained weights. If it raises, the averages must not be saved as the run's weights. Does
        nothing in a run that cannot resume exactly.
        """
        if self.resumes_exactly:
            self.run.driver.keep_weight_sample()

    def save(self, why: SaveReason) -> None:
        """Saves a checkpoint of this step.

        Args:
            why: the reason.
        """
        with self.run.schedule.saving(regular=why is SaveReason.REGULAR):
            step = self.run.data.step
            if why.adds_anchor and self.run.store.trainer_save is None:
                # Before the save: a restart from it has to know what is learnt here.
                self.add_anchor()
            self.write(step, why)
            if step not in self.run.known.restorable:
                self.run.comparisons.forget_unsaved_anchor(step)

    def add_anchor(self) -> None:
        """Adds the current weights as an anchor, with which later weights are compared.

        The checkpoints that a rollback to an anchor needs are protected from deletion, in host
        memory and on disk. An anchor whose checkpoint was deleted could lead to a verdict that no
        rollback can carry out.
        """
        step = self.run.data.step
        self.run.comparisons.add_anchor(step, {*self.run.known.restorable, step})
        self.run.store.ring.protected = self.run.comparisons.steps_needed

    def write(self, step: int, why: SaveReason) -> None:
        """Saves the live state as the checkpoint of `step`. Reports a failed save.

        Waits while the disk still writes the previous checkpoint. `poll` reports later errors.

        Args:
            step: steps done, or the target of a rollback.
            why: the reason.

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
            self.run.known.add(step)
            self.unsaved.pop(step, None)
            seconds = round(time.monotonic() - began, 6)
            self.run.log.event("save", step=step, why=why.value, seconds=seconds)
        self._deleter.queue_deletions(step)

    def poll(self) -> None:
        """Reports results of the background, and computes the known-good checkpoints.

        Called once per step, and does not wait for the disk. A failed save is therefore reported
        some steps after it was ordered.
        """
        self.report_failures()
        self._deleter.collect_results()
        self.run.known.end_due_probation()

    def wait(self) -> None:
        """Waits until the background is done, and reports failed saves.

        A restore calls it first: the newest checkpoint may still be on its way to the disk. The
        training stands still meanwhile, so it is called only where the result is needed at once.
        """
        self.run.store.join()
        self.report_failures()

    def report_failures(self) -> None:
        """Reports failed saves, and errors for which another copy was used.

        A failed save does not end the run: the checkpoint before it is still there. A damaged copy
        is reported with a warning, because the checkpoint has one copy less than the user expects.
        """
        for error in self.run.store.take_failures():
            if isinstance(error, SaveFailed):
                self._save_failed(error.step, error)
            elif isinstance(error, CheckpointDamaged):
                self.run.known.report_damage(error, other_copy=True)
                self.run.log.warning(f"{error}; another copy was used")
            else:
                self.run.log.problem(self.run.data.step, str(error))

    def _save_failed(self, step: int, error: Exception) -> None:
        """Notes a failed save. Warns at the 1st, 2nd, 4th, ... failure of this process."""
        if not (isinstance(error, SaveFailed) and error.elsewhere):
            if step not in self.run.store.ring.copies:
                self.run.known.remove({step})
            self.unsaved[step] = str(error)
        self._failures += 1
        self.run.log.event("save_failed", step=step, problem=str(error))
        if self._failures & (self._failures - 1) == 0:  # a power of two
            self.run.log.warning(f"checkpoint {step} was not saved: {error}")

    def nonfinite_in_state(self) -> list[str]:
        """Names of the arrays in the live state with disallowed NaN or Inf on any rank, sorted.

        An array that had NaN or Inf at the start of the run, such as a mask with -Inf, may have
        them later too. Any other array with NaN or Inf is damage that a checkpoint would keep.
        """
        return sorted(
            disallowed(self.run.store.nonfinite_in(self.items()), self.run.store.nonfinite_ok)
        )

    def save_if_not_finite(self) -> None:
        """Saves weights with NaN or Inf at the end of a run, after an alarm without an order.

        The inspection of the save then finds the arrays with NaN or Inf, which leads to a rollback.
        Without it, a run that ends directly after the alarm would end with broken weights. Does
        nothing if this step is saved already, if no alarm is recent, or if gradients are
        accumulated.
        """
        due = self.run.data.step != self.run.schedule.last_saved and self.run.schedule.recent_alarm
        if due and self.run.schedule.may_save and not self.run.driver.has_finite_weights():
            self.save(SaveReason.LAST)

    def save_last(self, *, completed: bool) -> None:
        """Saves a checkpoint of the last step, if the last checkpoint is older.

        Args:
            completed: whether the loop has ended by itself. Then no later step needs the
                accumulated gradients, which a checkpoint does not hold.

        Raises:
            StoreError: the changes by batches of an unfinished step cannot be undone.
        """
        step = self.run.data.step
        if step == self.run.schedule.last_saved:
            self.wait()
            if step not in self.unsaved:
                return
        if not self.run.schedule.may_save:
            lost = f"a restart resumes from step {self.run.schedule.last_saved}"
            if completed:
                lost = "the gradients since the last optimizer step are not saved"
            self.run.log.problem(step, f"the run ends within an accumulation window: {lost}")
            if not completed:
                return
        if completed:
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
        if self.run.ledger.open or self.run.schedule.recent_alarm:
            return "the last steps had an alarm"
        if not self.run.driver.has_finite_weights():
            return "the weights are not finite"
        if self.run.data.within_batch:
            return "the updates on this batch have not ended"
        if self.run.data.step == self.run.schedule.last_saved:
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
        pending = any(loader.first_pending is not None for loader in loaders)
        in_body = loaders.last_trained is not None and loaders.last_trained.in_use
        if not self.resumes_exactly or (in_body and not pending):
            yield
            return
        why_not = self.run.driver.undo_window()
        if why_not:
            raise StoreError(why_not)
        position = loaders.position_after_step()
        if position is None:
            raise StoreError("the loader cannot be rewound to the first batch of the step")
        with self.run.data.host.before_batches(position):
            yield
        if pending:
            line = "batches that were read for the next step come again after a restart"
            self.run.log.event("data", step=self.run.data.step, outcome=line)
            self.run.log.info(f"step {self.run.data.step}: {line}")


MAX_CANDIDATES = 8
"""Max checkpoints on probation in a store, unless `keep` is set."""


def default_keep(probation: int, every: int) -> Keep:
    """The checkpoints to keep on disk by default: among others the candidates of one probation.

    Args:
        probation: healthy steps after which a checkpoint is known-good.
        every: steps between two saves.
    """
    saves_per_probation = math.ceil(probation / every)
    return Keep(candidates=min(saves_per_probation + 1, MAX_CANDIDATES), older=True)


class Deleter:
    """Deletes superfluous checkpoints each time that another checkpoint becomes known-good.

    Until then an older checkpoint is the newest known-good checkpoint, and a rollback may need
    every checkpoint since.

    Args:
        run: the parts of the run.
        keep: the checkpoints to keep on disk, or None for `default_keep`.
    """

    def __init__(self, run: Run, keep: Keep | None) -> None:
        self.run = run
        self.keep = keep or default_keep(run.policy.rollback.probation, run.schedule.every)
        """The checkpoints to keep on disk."""
        self._known_good_up_to = -1  # of the record, at the last deletion
        self._results: deque[set[int] | Exception] = deque()
        """Results of the background: steps of deleted checkpoints, or the problem."""

    def begin_attempt(self, step: int) -> None:
        """Begins an attempt at a step, after which no checkpoint is known-good.

        Without this call, `queue_deletions` would delete nothing until the repeated steps have
        passed the newest checkpoint that was known-good before the rollback.

        Args:
            step: first step of the attempt, after a start or a rollback.
        """
        self.collect_results()
        self._known_good_up_to = min(self._known_good_up_to, step)

    def queue_deletions(self, step: int) -> None:
        """Queues the deletions that are due, if the save of `step` succeeds.

        A second rollback in the region of the last one must not use a checkpoint that became
        known-good later, so the target of the last one and the next older known-good one stay. The
        decision uses the attempts as saved, so that a restart knows the same known-good
        checkpoints. The newest of them is verified first. If it is damaged, nothing is deleted.
        """
        store, record = self.run.store, self.run.record
        if record.known_good_up_to <= self._known_good_up_to:
            return
        self._known_good_up_to = record.known_good_up_to
        stay = store.ring.protected | self.run.known.newer_than_start
        trials = record.trials_for(record.ledger.next_step, self.run.policy.rollback.probation)
        if trials is not None:  # a start after a stop resumes from it
            stay = {*stay, trials.oldest}
        choose = partial(_choose, store, record.attempt_history, step, self._last_target())

        def delete() -> None:
            try:
                chosen = run_on_first(store.ranks, partial(choose, self.keep, stay))
                if chosen.surplus and chosen.newest_good is not None:
                    store.verify(chosen.newest_good)
                for old in chosen.surplus:
                    with suppress(CheckpointNotFound):
                        store.delete(old)
                self._results.append(chosen.known)
            except Exception as error:
                self._results.append(error)

        store.submit(step, delete)

    def _last_target(self) -> int:
        """Target of the last rollback in this region of the run, or -1."""
        ledger = self.run.record.ledger
        past = ledger.same_trouble(ledger.next_step, self.run.policy.rollback.region)
        return past[-1].target if past else -1

    def collect_results(self) -> None:
        """Reads the results of the deletions that have ended in the background. Does not wait.

        A deleted checkpoint leaves `KnownCheckpoints`. A damaged checkpoint is reported. Any other
        error becomes an event of the kind `problem`: a checkpoint that stays costs disk space, not
        the run.
        """
        while self._results:
            result = self._results.popleft()
            if isinstance(result, set):
                self.run.known.remove(result)
            elif isinstance(result, CheckpointDamaged):
                self.run.known.lose(result)
            else:
                step = self.run.ledger.next_step
                self.run.log.event("problem", step=step, problem=str(result))


class _Chosen(NamedTuple):
    """What to delete."""

    surplus: list[int]
    """Steps of the checkpoints to delete."""
    known: set[int]
    """Steps of `surplus` that are not abandoned. `KnownCheckpoints` lists them."""
    newest_good: int | None
    """Step of the newest known-good checkpoint, which stays, or None."""


def _choose(
    store: CheckpointStore,
    attempts: AttemptHistory,
    step: int,
    target: int,
    keep: Keep,
    stay: Collection[int],
) -> _Chosen:
    """Chooses what to delete after the save of `step`: nothing if this save is not in the store.

    `target` is of the last rollback in this region; `stay` are steps that may be needed.
    """
    saves = attempts.with_status(store.checkpoints())
    saves = [saved for saved in saves if saved.path or not store.durable]
    if (step, len(attempts.starts)) not in {(saved.step, saved.attempt) for saved in saves}:
        return _Chosen([], set(), None)
    good = [saved.step for saved in saves if saved.status == "good"]
    older = [at for at in good if at < target][-1:]
    surplus = superfluous(saves, keep, stay={*stay, target, *older})
    abandoned = {saved.step for saved in saves if saved.status == "abandoned"}
    return _Chosen(surplus, {*surplus} - abandoned, max(good, default=None))
