"""Saves, verifies, quarantines and deletes the checkpoints of a run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from healcore.runtime.checkpoints.background_verifier import BackgroundVerifier
from healcore.runtime.checkpoints.catalog import Catalog, PendingQuarantine
from healcore.runtime.checkpoints.restart_points import RestartPoints, TimeBudget
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

MAX_WAIT = 2.0
"""Seconds that all saves of a run together may wait for a slow disk."""
_WAIT_SHARE = 0.01
"""Share of the run's time that saves may wait in addition."""

_OPTIONAL_SAVES = frozenset({"regular", "ordered"})
"""Reasons of the saves that are skipped while the disk is busy."""


class CheckpointManager:
    """Saves, verifies, quarantines and deletes the checkpoints of one run.

    Args:
        store: store of the checkpoints.
        every: steps between two saves.
        keep: numbers of checkpoints to keep.
        probation: healthy steps until a checkpoint is known-good.
        region: onsets fewer steps apart belong to the same trouble.
        verifier: verifies and deletes in the background.
        ranks: the processes of the run.
        log: log of the run.
        restart_every: `every` of `RestartPoints`.
        restart_spread: `spread` of `RestartPoints`.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        every: int,
        keep: Keep,
        probation: int,
        region: int,
        verifier: BackgroundVerifier,
        ranks: Ranks,
        log: RunLog,
        restart_every: int | None = None,
        restart_spread: bool = False,
    ) -> None:
        self.store = store
        self.every = every
        self._verifier = verifier
        self._ranks = ranks
        self._log = log
        self.catalog = Catalog(keep.checked(), probation=probation, region=region)
        self.restart_points = RestartPoints(
            store, every=restart_every, spread=restart_spread, verifier=verifier, ranks=ranks
        )
        self._wait_budget = TimeBudget(MAX_WAIT, _WAIT_SHARE)
        self._saved_once = False
        self._deleted: deque[set[int]] = deque()
        self._in_memory_only: set[int] = set()
        """Steps of checkpoints that are not on disk because the disk was busy or failed."""
        self._left_alone: set[int] = set()
        """Steps of checkpoints that are newer than the checkpoint of the start."""
        self._logged_good: set[int] = set()
        self._nonfinite: dict[int, tuple[str, ...]] = {}
        self._pending_quarantine = PendingQuarantine(ranks)
        self._quarantined_late: deque[int] = deque()
        self._disk_failed = False
        self.good: int | None = None
        """Step of the newest known-good checkpoint."""
        self.damaged: list[int] = []
        """Steps of checkpoints found damaged on disk."""
        self.damaged_in_memory: list[int] = []
        """Steps of checkpoints found damaged in host memory."""
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
        """The checkpoints; checkpoints of an abandoned branch count as quarantined."""
        return self._pending_quarantine.applied(self.store.steps())

    def reload(self, resumed: int | None = None) -> None:
        """Reads the store's listing again, after a rollback, or after a start at step `resumed`.

        Checkpoints newer than `resumed` are neither used nor deleted, until a save replaces them.

        Drops all findings so far: they are about steps that the rollback has undone.
        """
        self._verifier.discard()
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
        self._in_memory_only.clear()
        self._nonfinite.clear()
        self.restart_points.clear()

    # -- saving ---------------------------------------------------------------------------------

    def due(self, step: int, taken: int = 1) -> bool:
        """Whether a save is due after `step` steps, the last `taken` of them in one dispatch."""
        return step // self.every != (step - taken) // self.every

    def save(
        self, step: int, state: Mapping[str, Any], healing: Mapping[str, Any], why: str
    ) -> None:
        """Saves a checkpoint. Reports a failed save, and training continues.

        While a slow disk still writes the previous checkpoint, a regular save goes to memory only,
        or is skipped if the store has no memory tier. `poll` reports later errors.

        Raises:
            UnsavableState: the first save found a value that cannot be saved.
        """
        late = why in _OPTIONAL_SAVES and any(
            self._ranks.gather(self._wait_budget.wait_until_deadline(self.store))
        )
        store = self.store.memory if late else self.store
        if late:
            outcome = "is skipped" if store is None else "is only in memory"
            problem = f"the disk still writes the previous checkpoint: checkpoint {step} {outcome}"
            self._report_failure(step, problem, problem)
        if store is None:
            return
        began = time.monotonic()
        try:
            store.save(step, state, healing=healing)
        except (StoreError, OSError) as error:
            if isinstance(error, UnsavableState) and not self._saved_once:
                raise
            self._save_failed(step, error)
            return
        self._saved_once = True
        self._left_alone.discard(step)
        self.restart_points.keep(step)
        self.restart_points.delete_older(step)
        self.unsaved.discard(step)
        (self._in_memory_only.add if late else self._in_memory_only.discard)(step)
        self.catalog.add(step)
        self._log.event("save", step=step, why=why, seconds=round(time.monotonic() - began, 6))
        if self._pending_quarantine:
            self._verifier.submit(
                self.store,
                step,
                lambda tier: self._quarantined_late.extend(self._pending_quarantine.write(tier)),
            )

    def protect(self, steps: Iterable[int]) -> None:
        """Protects the checkpoints of these steps from deletion, and no others."""
        self.catalog.protected = frozenset(steps)
        for tier in self.store.tiers:
            tier.protected = self.catalog.protected

    def save_for_restart(
        self, step: int, state: Mapping[str, Any], healing: Mapping[str, Any]
    ) -> None:
        """Saves a restart point, unless it would cost too much time."""
        began = time.monotonic()
        try:
            saved = self.restart_points.save(step, state, healing)
        except (StoreError, OSError) as error:
            self._save_failed(step, error)
            return
        if saved:
            seconds = round(time.monotonic() - began, 6)
            self._log.event("save", step=step, why="restart", seconds=seconds)

    def in_memory_only(self, step: int) -> bool:
        """Whether a checkpoint is in memory but not on disk. Waits for the disk."""
        if self.store.disk is None or self.store.memory is None:
            return False
        self.wait()  # a write in progress may still succeed
        return any(saved.step == step and saved.path is None for saved in self.listed())

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

    def finish(self, ledger: Ledger, step: int) -> None:
        """The last `poll` of a run; waits for the queue."""
        self.poll(ledger)
        self.restart_points.delete_older(step)
        self._wait_for_results()

    def _wait_for_results(self) -> None:
        self._verifier.wait()
        self._read_results()

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
            self._verifier.verify(
                self.store,
                step,
                then=self._deletion(to_delete, {*steps}.difference(surplus)),
                nearest_only=step in self._in_memory_only,
            )
            self._in_memory_only.discard(step)

    def _deletion(self, surplus: Sequence[int], new: set[int]) -> Callable[[CheckpointStore], None]:
        """Makes the job that deletes the `surplus` checkpoints of a tier.

        For each checkpoint of `new` that is not known-good (damaged, not finite, or not verified
        yet), the tier keeps one known-good checkpoint of `surplus`.
        """

        def delete(tier: CheckpointStore) -> None:
            saves = tier.steps()
            good = {saved.step for saved in saves if saved.status == "good"}
            stay = sorted(good.intersection(surplus), reverse=True)[: len(new - good)]
            to_delete = [s.step for s in saves if s.step in surplus and s.step not in stay]
            for step in agreed(tier.processes, to_delete):
                with suppress(CheckpointNotFound, LastGoodKept):
                    tier.delete(step)
            if tier is self.store.tiers[-1]:
                self._deleted.append({*surplus} - {saved.step for saved in tier.steps()})

        return delete

    def _read_results(self) -> None:
        for step, error in self._verifier.results():
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
        while self._quarantined_late:
            step = self._quarantined_late.popleft()
            self._log.event("quarantine", step=step, checkpoint=step)

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
        """Quarantines the checkpoints of `steps`. After an error call `retry_quarantine`."""
        self._verifier.wait()
        saves = self.listed()
        todo = [s.step for s in saves if s.step in steps and s.status != "quarantined"]
        for step in agreed(self._ranks, todo):
            try:
                self.store.mark(step, "quarantined")
            except (StoreError, OSError) as error:
                self._disk_failed = True
                self._log.problem(now, f"checkpoint {step} could not be quarantined: {error}")
            else:
                self._log.event("quarantine", step=now, checkpoint=step)
        self._report_store_errors(now)

    def retry_quarantine(self, target: int) -> None:
        """Schedules the quarantine on disk again if it failed in a rollback to `target`."""
        self._report_store_errors(target)
        failed, self._disk_failed = any(self._ranks.gather(self._disk_failed)), False
        if failed:
            self._pending_quarantine.add(target)

    def _report_store_errors(self, now: int) -> None:
        """Reports errors of one tier for which another tier was used instead."""
        reported = set()
        for error in self.store.trouble():
            if isinstance(error, CheckpointDamaged):
                self.log_damage(error)
                self._log.warning(f"{error}; another copy was used")
                continue
            self._disk_failed = True
            if str(error) not in reported:
                reported.add(str(error))
                self._log.problem(now, f"{error}; the run continues with the checkpoints in memory")

    def log_damage(self, error: CheckpointDamaged) -> None:
        """Reports a damaged checkpoint, once."""
        if error.path in self._damaged_paths:
            return
        if error.path != WHERE:  # names of directories are unique
            self._damaged_paths.add(error.path)
        (self.damaged_in_memory if error.path == WHERE else self.damaged).append(error.step)
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
        self._verifier.wait()

    def close(self) -> None:
        """Waits for the background and drops its results."""
        self._verifier.discard()

    def _save_failed(self, step: int, error: Exception) -> None:
        tiers = self.store.tiers
        if len(tiers) == 1 or step not in {saved.step for saved in tiers[0].steps()}:
            self.catalog.remove(step)
        elif self._ranks.world == 1:  # ranks notice a failure at different steps
            self._in_memory_only.add(step)
        self.unsaved.add(step)
        line = f"checkpoint {step} was not saved: {error}"
        self._report_failure(step, str(error), line)

    def _report_failure(self, step: int, problem: str, line: str) -> None:
        self.failures += 1
        self.last_failure = problem
        self._log.event("save_failed", step=step, problem=problem)
        if self.failures & (self.failures - 1) == 0:  # the 1st, 2nd, 4th, ... failure
            self._log.warning(line)
