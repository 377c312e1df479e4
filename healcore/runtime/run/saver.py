"""`Saver`: decides when a run saves, which checkpoints are known-good, and which are deleted.

A checkpoint is known-good if it is finite, not abandoned, and followed by `probation` healthy
steps. Deletions run in the queue of the saves. So the contents of a store depend on the steps, and
on the speed of a disk only where saves would take too much time, see `Saver._is_within_time`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

from healcore.runtime.run.comparisons import Comparisons
from healcore.runtime.run.evidence import MAX_SHARE
from healcore.runtime.run.host_state import HOST_ITEM
from healcore.runtime.run.run_batches import RunBatches
from healcore.runtime.run.run_context import RunContext
from healcore.runtime.run_options import Checkpoints
from healcore.runtime.store.host_copy import MEMORY
from healcore.runtime.store.ranks import on_first
from healcore.runtime.store.saved import (
    CheckpointDamaged,
    CheckpointNotFound,
    Keep,
    Saved,
    SaveFailed,
    StoreError,
    UnsavableState,
    disallowed,
    superfluous,
)

RECENT_ALARM_STEPS = 2
"""Steps after an alarm in which no checkpoint is saved: the alarm may begin an incident."""
_UNSAVED_INTERVALS = 3
"""Checkpoint intervals without a save after which a run warns."""
FREE_S = 10.0
"""Seconds that the regular saves of a run may take in addition to `MAX_SHARE` of its time."""
MAX_CANDIDATES = 8
"""Max checkpoints on probation in a store, unless `keep` is set."""


class Saver:
    """Saves and deletes the checkpoints of one run.

    Args:
        context: what the parts of the run share.
        data: has the step and the loaders of the run.
        options: steps between two saves, and the numbers of checkpoints to keep.

    Attributes:
        started_from: step of the snapshot or checkpoint that this process started from, or -1.
        damage: errors of damaged checkpoints, as this process has found them.
        nonfinite: step and array names of each checkpoint with disallowed NaN or Inf.
        unsaved: step whose save failed and was not repeated -> the problem.
        comparisons: the comparisons of weights, whose state is saved. Set by `Recovery`.
    """

    comparisons: Comparisons

    def __init__(self, context: RunContext, data: RunBatches, options: Checkpoints) -> None:
        self.context, self.data, self.store = context, data, context.store
        probation = self._probation = context.policy.rollback.probation
        self.every = options.every or probation
        candidates = min(-(-probation // self.every) + 1, MAX_CANDIDATES)
        self._keep = options.keep or Keep(candidates=candidates, older=True)
        self.started_from = -1
        self.damage: list[CheckpointDamaged] = []
        self.nonfinite: list[tuple[int, tuple[str, ...]]] = []
        self.unsaved: dict[int, str] = {}
        self._resumes_exactly = context.store.durable and context.ranks.world == 1
        """Whether a run can resume exactly from a save at an exception."""
        self._failures, self._saved_once = 0, False
        self._finite: dict[int, bool] = {}
        """Step of each checkpoint that is not abandoned -> whether it is finite as far as known."""
        self._lost: set[int] = set()
        """Steps of damaged checkpoints without another copy."""
        self._never_deleted: set[int] = set()
        """Steps of checkpoints newer than the resumed one: this process could not use them."""
        self._nonfinite_now: dict[int, tuple[str, ...]] = {}  # of this attempt
        self._pruned = -1  # `RunRecord.known_good_up_to` at the last deletion
        self._deletions: deque[set[int] | Exception] = deque()
        """Results of the background: steps of deleted checkpoints, or the problem."""
        self._last_saved = -1  # step of the last checkpoint or of the start
        self._next_warning = _UNSAVED_INTERVALS * self.every  # steps without a save
        self._limits_time, self._within_time, self._saving_s = options.every is None, True, 0.0
        self._checked_interval = -1  # of the last answer of `_is_within_time`
        self._began, self._slow_saves_reported = time.monotonic(), False

    # -- what a checkpoint holds ----------------------------------------------------------------

    def items(self) -> dict[str, Any]:
        """The live state to save, except healcore's record."""
        return {**self.context.driver.state(), HOST_ITEM: self.data.host}

    def record_of(self, step: int) -> dict[str, Any]:
        """Healcore's record after `step` steps."""
        return replace(
            self.context.record,
            step=step,
            world=self.context.ranks.world,
            engines=self.context.driver.engines(),
            skipped=self.data.loaders.skipped_by_loader(),
            forward=self.data.loaders.forward_positions(),
            comparisons=self.comparisons.state if self.comparisons.is_enabled else None,
        ).to_dict()

    def replace_record(self, step: int) -> None:
        """Replaces the record of a checkpoint by the current record, by one rename."""
        self.store.replace_record(step, self.record_of(step))

    # -- the checkpoints in the store -----------------------------------------------------------

    def listed(self) -> list[Saved]:
        """The checkpoints with their statuses, without those that are known to be damaged."""
        saves = self.context.record.attempt_history.with_status(self.store.steps())
        return [saved for saved in saves if saved.step not in self._lost]

    def begin_attempt(self, step: int) -> None:
        """Begins an attempt at a step. Checkpoints of later steps are abandoned.

        Drops all findings so far, because their steps are repeated.
        """
        self.store.nonfinite_found()
        self._nonfinite_now = {}
        self._read_deletions()
        if self.started_from < 0:
            self.started_from = step
            saves = [each for each in self.listed() if each.status != "abandoned"]
            self._finite = {each.step: each.finite for each in saves}
            self._never_deleted = {at for at in self._finite if at > step}
        self._pruned = min(self._pruned, step)
        self.context.record.attempts.append(step)
        self.context.record.known_good_up_to = min(self.context.record.known_good_up_to, step)
        self._finite = {at: finite for at, finite in self._finite.items() if at <= step}
        self._last_saved = step

    @property
    def restorable(self) -> set[int]:
        """Steps of the checkpoints that a rollback could restore."""
        return {step for step, finite in self._finite.items() if finite}

    @property
    def last_good_step(self) -> int | None:
        """Step of the newest known-good checkpoint, or None."""
        last = self.context.record.known_good_up_to
        return max((at for at in self.restorable if at <= last), default=None)

    @property
    def on_probation(self) -> list[int]:
        """Steps of the checkpoints whose probation is not over, ascending."""
        return sorted(at for at in self._finite if at > self.context.record.known_good_up_to)

    # -- when to save ---------------------------------------------------------------------------

    def due(self) -> bool:
        """Whether a regular save is due, and possible. Called once per dispatch.

        Warns if nothing was saved for three intervals, then at twice the distance each time.
        """
        step, saved, driver = self.data.step, self._last_saved, self.context.driver
        if step - saved >= self._next_warning:
            self._next_warning *= 2
            why = "alarms delay the save"
            if not driver.may_save(self.every):
                why = "an optimizer has gradients that it has not stepped with: step or zero_grad()"
            elif not self._within_time:
                why = f"saves have taken {self._saving_s:.0f} s, more than 1 % of the time; "
                why += "Checkpoints(every=N) saves every N steps"
            line = f"no checkpoint since step {saved} ({why}); a restart begins at step {saved}"
            if self._within_time or not self._slow_saves_reported:
                self.context.log.problem(step, line)
            self._slow_saves_reported |= not self._within_time
        is_due = self._missed_saves > 0 and not self.delayed
        return is_due and driver.may_save(self.every) and self._is_within_time()

    def _is_within_time(self) -> bool:
        """Whether the saves so far have taken little time. Collective once per interval.

        Without this bound a state that takes as long to write as 100 steps take makes a run twice
        as long (124 M parameters on an H100: 66 ms per step, and 37 ms without saves).
        """
        interval = self.data.step // self.every
        if interval != self._checked_interval and self._limits_time:
            allowed = FREE_S + MAX_SHARE * (time.monotonic() - self._began)
            self._within_time = not any(self.context.ranks.gather(self._saving_s > allowed))
            self._checked_interval = interval
        return self._within_time

    @property
    def _missed_saves(self) -> int:
        """Number of regular saves that were due since the last checkpoint."""
        return self.data.step // self.every - self._last_saved // self.every

    @property
    def delayed(self) -> bool:
        """Whether a recent alarm, which may begin an incident, delays a regular save.

        The delay is at most one interval, because a run with occasional alarms has an incident open
        most of the time. A checkpoint after an onset does no harm: a rollback abandons it.
        """
        return self._recent_alarm and self._missed_saves <= 1 and not self.context.policy.observes

    @property
    def _recent_alarm(self) -> bool:
        first = self.data.step - RECENT_ALARM_STEPS
        return any(step >= first for step in self.context.ledger.unhealthy[-1:])

    # -- saving ---------------------------------------------------------------------------------

    def keep_random_states(self) -> None:
        """Keeps the random states after a step or an epoch, for a save at a later exception."""
        if self._resumes_exactly:
            self.data.host.after_step()

    def save(self, why: str) -> None:
        """Saves a checkpoint of this step, for the reason `why`."""
        step, began = self.data.step, time.monotonic()
        self._last_saved, self._next_warning = step, _UNSAVED_INTERVALS * self.every
        self.write(step, why)
        if why in ("first", "regular"):
            self.keep_anchor()
        self._saving_s += time.monotonic() - began if why == "regular" else 0.0

    def keep_anchor(self) -> None:
        """Adds the current weights as an anchor, and protects the anchors' checkpoints."""
        self.comparisons.keep(self.data.step, self.restorable)
        self.store.ring.protected = frozenset(each.step for each in self.comparisons.anchors)

    def write(self, step: int, why: str) -> None:
        """Saves the live state as the checkpoint of `step`. Reports a failed save.

        Waits while the disk still writes the previous checkpoint. `poll` reports later errors.
        Raises UnsavableState if the first save found a value that cannot be saved.
        """
        if self.store.trainer_save is not None:
            if why == "ordered":
                self.store.trainer_save()
            return
        began = time.monotonic()
        try:
            self.store.save(step, self.items(), record=self.record_of(step))
        except (StoreError, OSError) as error:
            if isinstance(error, UnsavableState) and not self._saved_once:
                raise
            self._save_failed(step, error)
        else:
            self._saved_once = self._finite[step] = True
            self._lost.discard(step)
            self.unsaved.pop(step, None)
            self.context.log.event(
                "save", step=step, why=why, seconds=round(time.monotonic() - began, 6)
            )
        if self.context.record.known_good_up_to > self._pruned:
            self._pruned = self.context.record.known_good_up_to
            self._prune(step)

    def _prune(self, step: int) -> None:
        """Queues the deletion of superfluous checkpoints, if the save of `step` succeeds.

        Within the region of the last rollback, its target and the next older known-good checkpoint
        stay: a second rollback there must not use a checkpoint that became known-good later. The
        decision uses the attempts as saved, so that a restart knows the same known-good ones. The
        newest of them is verified first: nothing is deleted for a damaged one.
        """
        attempts, ledger = self.context.record.attempt_history, self.context.ledger
        last = ledger.same_trouble(ledger.next_step, self.context.policy.rollback.region)[-1:]
        target = last[0].target if last else 0
        stays = self.store.ring.protected | self._never_deleted | {each.target for each in last}

        def chosen() -> tuple[list[int], set[int], int | None]:
            saves = attempts.with_status(self.store.steps())
            saves = [saved for saved in saves if saved.path or not self.store.durable]
            if (step, len(attempts.starts)) not in {(s.step, s.attempt) for s in saves}:
                return [], set(), None
            good = [saved.step for saved in saves if saved.status == "good"]
            stay = {*stays, *[at for at in good if at < target][-1:]}
            surplus = [at for at in superfluous(saves, self._keep) if at not in stay]
            abandoned = {saved.step for saved in saves if saved.status == "abandoned"}
            return surplus, {*surplus} - abandoned, max(good, default=None)

        def delete() -> None:
            try:
                surplus, deleted, newest = on_first(self.store.ranks, chosen)
                if surplus and newest is not None:
                    self.store.verify(newest)
                for old in surplus:
                    with suppress(CheckpointNotFound):
                        self.store.delete(old)
                self._deletions.append(deleted)
            except Exception as error:
                self._deletions.append(error)

        self.store.submit(step, delete)

    # -- after a save ---------------------------------------------------------------------------

    def poll(self) -> None:
        """Reports results of the background, and computes the known-good checkpoints.

        Called once per step. Does not wait for the disk.
        """
        self.report_failures()
        self._read_deletions()
        ledger, on_probation = self.context.ledger, self.on_probation
        may_end = on_probation and ledger.next_step - on_probation[0] >= self._probation
        if may_end and not ledger.open:
            self.end_probation()
            # A rollback needs the steps since the newest known-good checkpoint.
            ledger.forget(min([self.last_good_step or 0, *self.on_probation]))

    def wait(self) -> None:
        """Waits until the background is done, and reports failed saves."""
        self.store.join()
        self.report_failures()

    def end_probation(self, *, before: float = math.inf) -> None:
        """Extends the known-good checkpoints to those whose probation was over before a step."""
        ledger = self.context.ledger
        for step in self.on_probation:
            if ledger.healthy_steps(step, int(min(before, ledger.next_step))) < self._probation:
                break
            self.context.record.known_good_up_to = step
            self.read_nonfinite(step)
            if self._finite[step]:
                self.context.log.event("good", step=step)

    def _read_deletions(self) -> None:
        while self._deletions:
            result = self._deletions.popleft()
            lost = result if isinstance(result, set) else set[int]()
            if isinstance(result, CheckpointDamaged):
                self.report_damage(result)
                lost = {result.step} - self.store.ring.copies.keys()
                self._lost |= lost
            elif isinstance(result, Exception):
                step = self.context.ledger.next_step
                self.context.log.event("problem", step=step, problem=str(result))
            self._finite = {at: each for at, each in self._finite.items() if at not in lost}

    def report_failures(self) -> None:
        """Reports failed saves, and errors for which another copy was used."""
        for error in self.store.failures():
            if isinstance(error, SaveFailed):
                self._save_failed(error.step, error)
            elif isinstance(error, CheckpointDamaged):
                self.report_damage(error)
                self.context.log.warning(f"{error}; another copy was used")
            else:
                self.context.log.problem(self.data.step, f"{error}; the copies in memory are used")

    def _save_failed(self, step: int, error: Exception) -> None:
        if step not in self.store.ring.copies:
            self._finite.pop(step, None)
        self.unsaved[step] = str(error)
        self._failures += 1
        self.context.log.event("save_failed", step=step, problem=str(error))
        if self._failures & (self._failures - 1) == 0:  # the 1st, 2nd, 4th, ... failure
            self.context.log.warning(f"checkpoint {step} was not saved: {error}")

    def report_damage(self, error: CheckpointDamaged) -> None:
        """Reports a damaged checkpoint; a directory once, because its name is unique."""
        if error.path == MEMORY or all(each.path != error.path for each in self.damage):
            self.damage.append(error)
            self.context.log.event("damaged", step=error.step, problem=str(error))

    # -- NaN and Inf ----------------------------------------------------------------------------

    def read_nonfinite(self, up_to: float = math.inf) -> dict[int, tuple[str, ...]]:
        """Step -> names of arrays with disallowed NaN or Inf, of the saves of this attempt.

        Waits until the saves up to a step are inspected, and not for the disk. Reports each once.
        """
        for step, names in self.store.nonfinite_found(up_to):
            if step in self._finite:
                self._finite[step] = False
            if step in self._nonfinite_now:
                continue
            problem = f"checkpoint {step} is not finite in {', '.join(names[:3])}"
            self.context.log.event("problem", step=step, problem=problem)
            if not self.nonfinite:
                self.context.log.warning(
                    f"{problem}: it can never be known-good. A skipped step does not undo changes "
                    "by the forward pass. If NaN or Inf is expected in these arrays, name them in "
                    "nonfinite_ok"
                )
            self.nonfinite.append((step, names))
            self._nonfinite_now[step] = names
        return self._nonfinite_now

    def nonfinite_in_state(self) -> list[str]:
        """Names of the arrays in the live state with disallowed NaN or Inf on any rank."""
        return sorted(disallowed(self.store.nonfinite_in(self.items()), self.store.nonfinite_ok))

    # -- the last state -------------------------------------------------------------------------

    def save_if_not_finite(self) -> None:
        """Saves if an alarm and NaN or Inf in the weights are too recent for an order."""
        due = self.data.step != self._last_saved and self._recent_alarm
        if due and self.context.driver.may_save(self.every) and not self.context.driver.finite():
            self.save("last")

    def save_last(self, *, completed: bool) -> None:
        """Saves a checkpoint of the last step, if the last checkpoint is older.

        `completed` says whether the loop has ended by itself. Then no later step needs the
        accumulated gradients, which a checkpoint does not hold.
        """
        step = self.data.step
        if step == self._last_saved:
            self.wait()
            if step not in self.unsaved:
                return
        if not self.context.driver.may_save(self.every):
            lost = "the gradients since the last optimizer step are not saved"
            lost = lost if completed else f"a restart resumes from step {self._last_saved}"
            self.context.log.problem(step, f"the run ends within an accumulation window: {lost}")
            if not completed:
                return
        with nullcontext() if completed else self._before_batches():
            self.save("last")

    def save_emergency(self) -> str:
        """Saves before an exception ends the run. Returns the reason if it could not, or "".

        A restart resumes from this checkpoint, which has passed no probation.
        """
        if self.context.ledger.open or self._recent_alarm:
            return "the last steps had an alarm"
        if not self.context.driver.finite():
            return "the weights are not finite"
        if self.data.within_batch:
            return "the updates on this batch have not ended"
        if self.data.step != self._last_saved:
            with self._before_batches():
                self.save("emergency")
        return ""

    @contextmanager
    def _before_batches(self) -> Iterator[None]:
        """A context in which a save has the state, positions and random states of the last step.

        A restart reads the batches since then again. Raises StoreError if the
        changes by these batches cannot be undone.
        """
        loaders = self.data.loaders
        unused = any(loader.first_unused is not None for loader in loaders)
        in_body = loaders.current is not None and loaders.current.in_use
        if not self._resumes_exactly or (in_body and not unused):
            yield
            return
        if why_not := self.context.driver.undo_window():
            raise StoreError(why_not)
        position = loaders.position_after_step()
        if position is None:
            raise StoreError("the loader cannot be rewound to the first batch of the step")
        with self.data.host.before_batches(position):
            yield
        if unused:
            line = "batches that were read for the next step come again after a restart"
            self.context.log.event("data", step=self.data.step, outcome=line)
            self.context.log.info(f"step {self.data.step}: {line}")
