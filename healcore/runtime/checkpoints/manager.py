"""Saves and deletes the checkpoints of a run, and computes which of them are known-good."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from healcore.runtime.incidents.ledger import Ledger
from healcore.runtime.run_log import RunLog
from healcore.runtime.store import (
    CheckpointDamaged,
    CheckpointNotFound,
    CheckpointStore,
    Course,
    Keep,
    Saved,
    SaveFailed,
    StoreError,
    UnsavableState,
    superfluous,
)
from healcore.runtime.store.host_copy import WHERE
from healcore.runtime.store.ranks import Ranks, on_first
from healcore.runtime.store.saved import disallowed


class CheckpointManager:
    """Saves and deletes the checkpoints of one run.

    A checkpoint is known-good if it is finite, not abandoned, and followed by `probation` healthy
    steps. Deletions run in the queue of the saves. So the contents of a store depend on the steps,
    not on the speed of a disk.

    Args:
        store: store of the checkpoints.
        every: steps between two saves.
        keep: numbers of checkpoints to keep.
        probation: healthy steps until a checkpoint is known-good.
        region: onsets fewer steps apart belong to the same trouble.
        ranks: the processes of the run.
        log: log of the run.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        every: int,
        keep: Keep,
        probation: int,
        region: int,
        ranks: Ranks,
        log: RunLog,
    ) -> None:
        self.store = store
        self.every = every
        self.course = Course()
        """The attempts of the run, and the step up to which checkpoints are known-good."""
        self._keep = keep.checked()
        self._probation = probation
        self._region = region
        self._ranks = ranks
        self._log = log
        self._finite: dict[int, bool] = {}
        """Step of each checkpoint that is not abandoned -> whether it is finite as far as known."""
        self._left_alone: set[int] = set()
        """Steps of unusable checkpoints newer than the checkpoint of the start: never deleted."""
        self._pruned = -1
        """`course.proven` at the last deletion."""
        self._verified: int | None = None
        """Step of the last checkpoint that was verified before a deletion."""
        self._results: deque[set[int] | Exception] = deque()
        """Results of `_prune`: steps of deleted checkpoints, or the problem."""
        self._lost: set[int] = set()
        """Steps of damaged checkpoints without another copy."""
        self._saved_once = False
        self._nonfinite: dict[int, tuple[str, ...]] = {}
        self.nonfinite: list[tuple[int, tuple[str, ...]]] = []
        """Step and array names of each checkpoint with disallowed NaN or Inf."""
        self._damaged_paths: set[str] = set()
        self.failures = 0
        self.unsaved: set[int] = set()
        """Steps whose save failed and was not repeated."""
        self.last_failure = ""
        """Problem of the last failed save."""

    # -- the checkpoints in the store -----------------------------------------------------------

    def listed(self) -> list[Saved]:
        """The checkpoints, without those that are known to be damaged."""
        saves = self.course.judged(self.store.steps())
        return [saved for saved in saves if saved.step not in self._lost]

    def begin_attempt(self, step: int, course: Course | None = None) -> None:
        """Begins an attempt at a step. Checkpoints of later steps are abandoned.

        Drops all findings so far, which are about steps that come again. `course` is the course of
        an earlier process.
        """
        self.store.nonfinite_found()
        self._nonfinite.clear()
        self._read_results(step)
        attempts, proven = course or self.course
        self._pruned = min(self._pruned, step, proven)
        self.course = Course((*attempts, step), min(proven, step))
        if course is not None:
            saves = course.judged(self.store.steps())
            self._finite = {each.step: each.finite for each in saves if each.status != "abandoned"}
            self._left_alone = {at for at in self._finite if at > step}
        self._finite = {at: finite for at, finite in self._finite.items() if at <= step}

    @property
    def restorable(self) -> set[int]:
        """Steps of the checkpoints that a rollback could restore."""
        return {step for step, finite in self._finite.items() if finite}

    @property
    def good(self) -> int | None:
        """Step of the newest known-good checkpoint, or None."""
        return max((at for at in self.restorable if at <= self.course.proven), default=None)

    @property
    def on_probation(self) -> list[int]:
        """Steps of the checkpoints whose probation is not over, ascending."""
        return sorted(at for at in self._finite if at > self.course.proven)

    def newest_finite_before(self, step: int) -> int:
        """Step of the newest finite checkpoint before `step`, or 0."""
        return max((at for at in self.restorable if at < step), default=0)

    # -- saving ---------------------------------------------------------------------------------

    def save(
        self, step: int, state: Mapping[str, Any], healing: Mapping[str, Any], why: str
    ) -> None:
        """Saves a checkpoint. Reports a failed save, and training continues.

        Waits while the disk still writes the previous checkpoint. `poll` reports later errors.

        Raises:
            UnsavableState: the first save found a value that cannot be saved.
        """
        if not self.store.accepts(why):
            return
        began = time.monotonic()
        try:
            self.store.save(step, state, healing=healing)
        except (StoreError, OSError) as error:
            if isinstance(error, UnsavableState) and not self._saved_once:
                raise
            self._save_failed(step, error)
            return
        self._saved_once = True
        self._lost.discard(step)
        self.unsaved.discard(step)
        self._finite[step] = True
        self._log.event("save", step=step, why=why, seconds=round(time.monotonic() - began, 6))

    def prune(self, step: int, ledger: Ledger) -> None:
        """Queues the deletion of superfluous checkpoints, if a save has new known-good ones.

        Within the region of the last rollback, its target and the next older known-good checkpoint
        stay: a second rollback there must not use a checkpoint that became known-good later.
        """
        if self.course.proven <= self._pruned:
            return
        self._pruned, course = self.course.proven, self.course
        last = ledger.same_trouble(ledger.next_step, self._region)[-1:]
        target = last[0].target if last else None
        stays = self.store.ring.protected | self._left_alone
        self.store.submit(step, lambda: self._prune(step, course, stays, target))

    def _prune(self, step: int, course: Course, stays: Iterable[int], target: int | None) -> None:
        """Deletes superfluous checkpoints, if the save of `step` is in the store.

        The decision uses `course` as saved, so that a restart knows the same known-good ones. The
        newest of them is verified first: nothing is deleted for a damaged one.
        """

        def chosen() -> tuple[list[int], set[int], int | None]:
            saves = course.judged(self.store.steps())
            saves = [saved for saved in saves if saved.path or not self.store.durable]
            good = [saved.step for saved in saves if saved.status == "good"]
            stay = {*stays, target, *[at for at in good if target and at < target][-1:]}
            there = any((s.step, s.attempt) == (step, len(course.attempts)) for s in saves)
            surplus = [at for at in superfluous(saves, self._keep) if there and at not in stay]
            abandoned = {saved.step for saved in saves if saved.status == "abandoned"}
            return surplus, {*surplus} - abandoned, max(good, default=None)

        try:
            surplus, own, newest = on_first(self.store.processes, chosen)
            if surplus and newest not in (None, self._verified):
                self.store.verify(newest)
                self._verified = newest
            for old in surplus:
                with suppress(CheckpointNotFound):
                    self.store.delete(old)
            self._results.append(own)
        except Exception as error:
            self._results.append(error)

    def is_unsaved(self, step: int) -> bool:
        """Whether the write of a checkpoint has failed. Waits for the disk."""
        self.wait()
        return step in self.unsaved

    def wait(self) -> None:
        """Waits until the background is done, and reports failed saves."""
        self.store.join()
        self._report_failed_saves()

    # -- known-good -----------------------------------------------------------------------------

    def poll(self, ledger: Ledger) -> None:
        """Reports results of the background, and computes the known-good checkpoints.

        Called once per step. Does not wait for the disk.
        """
        self._report_failed_saves()
        self._read_results(ledger.next_step)
        if ledger.open:
            return
        self.prove(ledger)
        if ledger.unhealthy:
            # A rollback needs the steps since the newest known-good checkpoint.
            ledger.forget(min([self.good or 0, *self.on_probation]))

    def _read_results(self, now: int) -> None:
        while self._results:
            result = self._results.popleft()
            if isinstance(result, set):
                for step in result:
                    self._finite.pop(step, None)
            elif isinstance(result, CheckpointDamaged):
                self.log_damage(result)
                if result.step not in self.store.steps_in_memory():
                    self._lost.add(result.step)
                    self._finite.pop(result.step, None)
            else:
                self._log.event("problem", step=now, problem=str(result))

    def prove(self, ledger: Ledger, *, before: int | None = None) -> None:
        """Extends the known-good checkpoints to those whose probation is over.

        Args:
            ledger: the run so far.
            before: only steps before this step count, or None to count all steps.
        """
        now = ledger.next_step if before is None else min(before, ledger.next_step)
        for step in self.on_probation:
            if healthy_steps(step, now, ledger.unhealthy) < self._probation:
                break
            self.course = self.course._replace(proven=step)
            self._read_nonfinite()
            if self._finite[step]:
                self._log.event("good", step=step)

    # -- NaN and Inf ----------------------------------------------------------------------------

    def nonfinite_checkpoints(self) -> dict[int, tuple[str, ...]]:
        """Step -> names of arrays with disallowed NaN or Inf, since the last rollback or start.

        Collective. Waits until the last save is inspected, and not for the disk.
        """
        self._read_nonfinite()
        united: dict[int, tuple[str, ...]] = {}
        for found_on_rank in self._ranks.gather(self._nonfinite):
            for step, names in found_on_rank.items():
                united[step] = tuple(dict.fromkeys((*united.get(step, ()), *names)))
        return united

    def _read_nonfinite(self) -> None:
        """Reports each checkpoint with disallowed NaN or Inf, once."""
        for step, names in self.store.nonfinite_found():
            if step in self._finite:
                self._finite[step] = False
            if step in self._nonfinite:
                continue
            problem = f"checkpoint {step} is not finite in {', '.join(names[:3])}"
            self._log.event("problem", step=step, problem=problem)
            if not self.nonfinite:
                self._log.warning(
                    f"{problem}: it can never be known-good. A skipped step does not undo changes "
                    "by the forward pass. If NaN or Inf is expected in these arrays, name them in "
                    "nonfinite_ok"
                )
            self._nonfinite[step] = names
            self.nonfinite.append((step, names))

    def allow_nonfinite_in(self, state: Mapping[str, Any]) -> list[str]:
        """Allows NaN and Inf in the arrays of a first state that hold them; returns the names."""
        names = self.nonfinite_in(state)
        self.allow_nonfinite(names)
        return names

    def nonfinite_in(self, state: Mapping[str, Any]) -> list[str]:
        """Names of the arrays in a state with disallowed NaN or Inf on any rank. Collective."""
        names = set().union(*self._ranks.gather(self.store.nonfinite_in(state)))
        return sorted(disallowed(names, self.store.nonfinite_ok))

    def allow_nonfinite(self, names: list[str]) -> None:
        """Allows NaN and Inf in these arrays."""
        self.store.nonfinite_ok = (*self.store.nonfinite_ok, *names)

    # -- errors ---------------------------------------------------------------------------------

    def report_store_errors(self, now: int) -> None:
        """Reports errors for which another copy was used instead."""
        for error in {str(error): error for error in self.store.trouble()}.values():
            if isinstance(error, CheckpointDamaged):
                self.log_damage(error)
                self._log.warning(f"{error}; another copy was used")
            else:
                self._log.problem(now, f"{error}; the run continues with the checkpoints in memory")

    def log_damage(self, error: CheckpointDamaged) -> None:
        """Reports a damaged checkpoint, once."""
        if error.path in self._damaged_paths:
            return
        if error.path != WHERE:  # names of directories are unique
            self._damaged_paths.add(error.path)
        self._log.event("damaged", step=error.step, problem=str(error))

    def _report_failed_saves(self) -> None:
        for failure in self.store.failures():
            self._save_failed(failure.step, failure)

    def _save_failed(self, step: int, error: SaveFailed | StoreError | OSError) -> None:
        if step not in self.store.steps_in_memory():
            self._finite.pop(step, None)
        self.unsaved.add(step)
        self.failures += 1
        self.last_failure = str(error)
        self._log.event("save_failed", step=step, problem=str(error))
        if self.failures & (self.failures - 1) == 0:  # the 1st, 2nd, 4th, ... failure
            self._log.warning(f"checkpoint {step} was not saved: {error}")


def healthy_steps(step: int, now: int, unhealthy: Sequence[int]) -> int:
    """Number of healthy steps from `step` to before step `now`; `unhealthy` is ascending.

    Unhealthy steps do not restart the count: otherwise no checkpoint would become known-good in a
    run that skips a bad batch now and then.
    """
    return now - step - (bisect_left(unhealthy, now) - bisect_left(unhealthy, step))
