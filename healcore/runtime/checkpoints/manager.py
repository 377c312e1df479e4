"""Saves, verifies, quarantines and deletes the checkpoints of a run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from healcore.runtime.checkpoints.catalog import Catalog
from healcore.runtime.incidents.ledger import Ledger
from healcore.runtime.run_log import RunLog
from healcore.runtime.store import (
    CheckpointDamaged,
    CheckpointNotFound,
    CheckpointStore,
    Keep,
    LastGoodKept,
    NotFinite,
    Saved,
    SaveFailed,
    StoreError,
    UnsavableState,
)
from healcore.runtime.store.inspection import disallowed
from healcore.runtime.store.memory import WHERE
from healcore.runtime.store.ranks import Ranks, agreed


class CheckpointManager:
    """Saves, verifies, quarantines and deletes the checkpoints of one run.

    Verifications and deletions run in the queue of each tier, in the order of the steps. So the
    contents of a store depend on the steps, not on the speed of a disk.

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
        self._ranks = ranks
        self._log = log
        self.catalog = Catalog(keep.checked(), probation=probation, region=region)
        self._saved_once = False
        self._verified: deque[tuple[int, Exception | None]] = deque()
        """Step of each verified checkpoint, and its problem; None for a known-good one."""
        self._deleted: deque[set[int]] = deque()
        self._left_alone: set[int] = set()
        """Steps of checkpoints that are newer than the checkpoint of the start."""
        self._logged_good: set[int] = set()
        self._nonfinite: dict[int, tuple[str, ...]] = {}
        self._abandoned: list[tuple[int, float]] = []
        """Target and Unix time of each rollback."""
        self.good: int | None = None
        """Step of the newest known-good checkpoint."""
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
        """The checkpoints; checkpoints of an abandoned branch count as quarantined.

        Their status on disk may differ if the disk could not be written at the rollback.
        """
        return [
            saved._replace(status="quarantined") if self._is_abandoned(saved) else saved
            for saved in self.store.steps()
        ]

    def _is_abandoned(self, saved: Saved) -> bool:
        return any(saved.step > target and saved.created < at for target, at in self._abandoned)

    def reload(self, resumed: int | None = None) -> None:
        """Reads the store's listing again, after a rollback, or after a start at step `resumed`.

        Checkpoints newer than `resumed` are neither used nor deleted, until a save replaces them.

        Drops all findings so far: they are about steps that the rollback has undone.
        """
        self.close()
        self.store.nonfinite_found()
        try:
            saves = self.listed()
        except StoreError as error:
            saves = []
            self._log.problem(None, f"the checkpoints cannot be listed: {error}")
        if resumed is not None:
            self._left_alone = {saved.step for saved in saves if saved.step > resumed}
        saves = [saved for saved in saves if saved.step not in self._left_alone]
        self.catalog.reset(saves)
        self._deleted.clear()
        self._logged_good = {s.step for s in saves if s.status == "good"}
        self.good = max(self._logged_good, default=None)
        self._nonfinite.clear()

    # -- saving ---------------------------------------------------------------------------------

    def due(self, step: int, taken: int = 1) -> bool:
        """Whether a save is due after `step` steps, the last `taken` of them in one dispatch."""
        return step // self.every != (step - taken) // self.every

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
        self._left_alone.discard(step)
        self.unsaved.discard(step)
        self.catalog.add(step)
        self._log.event("save", step=step, why=why, seconds=round(time.monotonic() - began, 6))

    def protect(self, steps: Iterable[int]) -> None:
        """Protects the checkpoints of these steps from deletion, and no others."""
        self.catalog.protected = frozenset(steps)
        for tier in self.store.tiers:
            tier.protected = self.catalog.protected

    def is_unsaved(self, step: int) -> bool:
        """Whether the write of a checkpoint has failed. Waits for the disk."""
        self.wait()
        return step in self.unsaved

    # -- known-good -----------------------------------------------------------------------------

    def poll(self, ledger: Ledger) -> None:
        """Reports results of the background and queues the next verifications.

        Called once per step. The queue depends on the steps alone. Does not wait for the disk.
        """
        for failure in self.store.failures():
            self._save_failed(failure.step, failure)
        self._read_results()
        if ledger.open:
            return
        self._verify(self._probation_passed(ledger), ledger)
        if ledger.unhealthy:
            # A rollback needs the steps since the newest known-good checkpoint.
            ledger.forget(min([self.good or 0, *self.catalog.on_probation]))

    def verify_due(self, ledger: Ledger, *, before: int) -> None:
        """Verifies all checkpoints whose probation was over at step `before`. Waits. Collective.

        The target of a rollback must depend on the steps, not on the speed of a disk.
        """
        self._verify(self._on_every_rank(self.catalog.probation_passed(ledger, before)), ledger)
        self._wait_for_results()

    def finish(self, ledger: Ledger) -> None:
        """The last `poll` of a run; waits for the queue."""
        self.poll(ledger)
        self._wait_for_results()

    def _wait_for_results(self) -> None:
        self._join()
        self._read_results()

    def _join(self) -> None:
        """Waits for the jobs of all tiers; raises no errors."""
        for tier in self.store.tiers:
            if tier.queue is not None:
                tier.queue.join()

    def _probation_passed(self, ledger: Ledger) -> list[int]:
        """Steps of checkpoints whose probation is over, the same on every rank.

        Ranks notice a failed write at different steps. So they exchange their lists every few
        steps, even if a list is empty.
        """
        if self._ranks.world == 1:
            return self.catalog.probation_passed(ledger)
        if ledger.next_step % max(1, self.every // 2):
            return []
        return self._on_every_rank(self.catalog.probation_passed(ledger))

    def _on_every_rank(self, steps: list[int]) -> list[int]:
        return sorted(set.intersection(*map(set, self._ranks.gather(steps))))

    def _verify(self, steps: Sequence[int], ledger: Ledger) -> None:
        """Queues verifications, and after each of them the deletion of surplus checkpoints."""
        if not steps:
            return
        surplus = agreed(self._ranks, self.catalog.mark_good(steps, ledger))
        for index, step in enumerate(steps, 1):
            to_delete = [old for old in surplus if old not in steps[index:]]
            new = {*steps}.difference(surplus)
            for tier in self.store.tiers:
                job = partial(self._verify_in, tier, step, to_delete, new)
                if tier.queue is None:
                    job()
                else:
                    tier.queue.submit(step, "while verifying it", job)

    def _verify_in(
        self, tier: CheckpointStore, step: int, surplus: Sequence[int], new: set[int]
    ) -> None:
        """Verifies a checkpoint of a tier, marks it as known-good, and deletes `surplus` ones."""
        try:
            try:
                # A save that failed leaves an older, quarantined save of the step.
                if tier.verify(step).status != "quarantined":
                    tier.mark(step, "good")
                    self._verified.append((step, None))
            except CheckpointDamaged as error:
                self._verified.append((step, error))
                tier.take_out(step, copied=len(self.store.tiers) > 1)
            except NotFinite as error:
                self._verified.append((step, error))
            self._delete(tier, surplus, new)
        except CheckpointNotFound:
            return
        except Exception as error:
            self._verified.append((step, error))

    def _delete(self, tier: CheckpointStore, surplus: Sequence[int], new: set[int]) -> None:
        """Deletes the `surplus` checkpoints of a tier.

        For each checkpoint of `new` that is not known-good (damaged, not finite, or not verified
        yet), the tier keeps one known-good checkpoint of `surplus`.
        """
        saves = tier.steps()
        good = {saved.step for saved in saves if saved.status == "good"}
        stay = sorted(good.intersection(surplus), reverse=True)[: len(new - good)]
        to_delete = [s.step for s in saves if s.step in surplus and s.step not in stay]
        for step in agreed(tier.processes, to_delete):
            with suppress(CheckpointNotFound, LastGoodKept):
                tier.delete(step)
        if tier is self.store.tiers[-1]:
            self._deleted.append({*surplus} - {saved.step for saved in tier.steps()})

    def _read_results(self) -> None:
        while self._verified:
            step, error = self._verified.popleft()
            if error is None:
                self.good = max(step, self.good or 0)
                if step not in self._logged_good:
                    self._logged_good.add(step)
                    self._log.event("good", step=step)
            elif isinstance(error, CheckpointDamaged):
                self.log_damage(error)
                another_copy = step in self._logged_good or len(self.store.tiers) > 1
                if not another_copy:
                    self.catalog.quarantine(step)
            elif isinstance(error, NotFinite):
                self._log_nonfinite(step, error.names)
            else:
                self._log.event("problem", step=step, problem=str(error))
        while self._deleted:
            self.catalog.mark_deleted(self._deleted.popleft())

    # -- NaN and Inf ----------------------------------------------------------------------------

    def nonfinite_checkpoints(self) -> dict[int, tuple[str, ...]]:
        """Step -> names of arrays with disallowed NaN or Inf, since the last rollback or start.

        Collective. Copies in memory are checked at once, other checkpoints when they are written.
        """
        for step, names in self.store.nonfinite_found():
            self._log_nonfinite(step, names)
        united: dict[int, tuple[str, ...]] = {}
        for found_on_rank in self._ranks.gather(self._nonfinite):
            for step, names in found_on_rank.items():
                united[step] = tuple(dict.fromkeys((*united.get(step, ()), *names)))
        return united

    def _log_nonfinite(self, step: int, names: Sequence[str]) -> None:
        """Reports a checkpoint with disallowed NaN or Inf, once."""
        self.catalog.mark_nonfinite(step)
        if step in self._nonfinite:
            return
        problem = f"checkpoint {step} is not finite in {', '.join(names[:3])}"
        self._log.event("problem", step=step, problem=problem)
        if not self.nonfinite:
            self._log.warning(
                f"{problem}: it can never be known-good. A skipped step does not undo changes by "
                "the forward pass. If NaN or Inf is expected in these arrays, name them in "
                "nonfinite_ok"
            )
        self._nonfinite[step] = tuple(names)
        self.nonfinite.append((step, tuple(names)))

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

    # -- quarantine and errors ------------------------------------------------------------------

    def quarantine(self, steps: list[int], *, now: int) -> None:
        """Quarantines the checkpoints of `steps`."""
        self._join()
        saves = self.listed()
        todo = [s.step for s in saves if s.step in steps and s.status != "quarantined"]
        for step in agreed(self._ranks, todo):
            try:
                self.store.mark(step, "quarantined")
            except (StoreError, OSError) as error:
                self._log.problem(now, f"checkpoint {step} could not be quarantined: {error}")
            else:
                self._log.event("quarantine", step=now, checkpoint=step)
        self._report_store_errors(now)

    def abandon(self, target: int) -> None:
        """Never uses the present checkpoints after `target` again. Collective.

        Only those that could not be marked are remembered, by the time: a clock may go back.
        """
        self._report_store_errors(target)
        try:
            left = any(s.step > target and s.status != "quarantined" for s in self.listed())
        except StoreError:
            left = True
        if any(self._ranks.gather(left)):
            self._abandoned.append((target, agreed(self._ranks, time.time())))

    def _report_store_errors(self, now: int) -> None:
        """Reports errors of one tier for which another tier was used instead."""
        reported = set()
        for error in self.store.trouble():
            if isinstance(error, CheckpointDamaged):
                self.log_damage(error)
                self._log.warning(f"{error}; another copy was used")
                continue
            if str(error) not in reported:
                reported.add(str(error))
                self._log.problem(now, f"{error}; the run continues with the checkpoints in memory")

    def log_damage(self, error: CheckpointDamaged) -> None:
        """Reports a damaged checkpoint, once."""
        if error.path in self._damaged_paths:
            return
        if error.path != WHERE:  # names of directories are unique
            self._damaged_paths.add(error.path)
        self._log.event("damaged", step=error.step, problem=str(error))

    def wait(self) -> None:
        """Waits until everything is written and verified, and reports failed saves."""
        while True:
            try:
                self.store.wait()
            except SaveFailed as failure:
                self._save_failed(failure.step, failure)
            else:
                break
        self._join()

    def close(self) -> None:
        """Waits for the background and drops its results."""
        self._join()
        self._verified.clear()

    def _save_failed(self, step: int, error: Exception) -> None:
        tiers = self.store.tiers
        if len(tiers) == 1 or step not in {saved.step for saved in tiers[0].steps()}:
            self.catalog.remove(step)
        self.unsaved.add(step)
        self.failures += 1
        self.last_failure = str(error)
        self._log.event("save_failed", step=step, problem=str(error))
        if self.failures & (self.failures - 1) == 0:  # the 1st, 2nd, 4th, ... failure
            self._log.warning(f"checkpoint {step} was not saved: {error}")
