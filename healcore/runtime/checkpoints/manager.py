"""Checkpoints while all is well: when to save, which are known-good by now, which may go."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from healcore.runtime.checkpoints.background_verifier import BackgroundVerifier
from healcore.runtime.checkpoints.catalog import Catalog
from healcore.runtime.checkpoints.pending_quarantine import PendingQuarantine
from healcore.runtime.checkpoints.wait_limit import WaitLimit
from healcore.runtime.ledger import Ledger
from healcore.runtime.store import (
    CheckpointDamaged,
    CheckpointStore,
    Keep,
    LastGoodKept,
    NotFinite,
    NotThere,
    Saved,
    SaveFailed,
    StoreError,
    UnsavableState,
)
from healcore.runtime.store.ranks import Ranks, agreed
from healcore.runtime.store.ring import WHERE

LogEvent = Callable[..., object]
"""Writes an event: ``log_event(kind, step=..., **fields)``."""

_UNHURRIED = frozenset({"regular", "ordered"})
"""Saves that may be left out; the others are asked for once."""


class CheckpointManager:
    """Looks after the checkpoints of one run.

    Args:
        store: where they are.
        every: steps between two saves.
        keep: how many of each kind stay.
        probation: healthy steps until one is known-good.
        region: steps within which trouble is the same trouble.
        verifier: verifies behind the training loop.
        ranks: the processes of this run.
        log_event: writes an event, see `Log.write`.
        warn: writes a warning to the console log.
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
        log_event: LogEvent,
        warn: Callable[[str], object],
    ) -> None:
        self.store = store
        self.every = every
        self._verifier = verifier
        self._ranks = ranks
        self._log_event = log_event
        self.warn = warn
        self.catalog = Catalog(keep.checked(), probation=probation, region=region)
        self._wait_limit = WaitLimit()
        self._saved_once = False
        self._deleted: deque[set[int]] = deque()
        self._near_only: set[int] = set()
        """Steps whose save the disk was too late for."""
        self._told_good: set[int] = set()
        self._not_finite: dict[int, tuple[str, ...]] = {}
        self._pending_quarantine = PendingQuarantine(ranks)
        self._set_aside_late: deque[int] = deque()
        self._disk_failed = False
        self.good: int | None = None
        """Step of the newest known-good checkpoint."""
        self.damaged: list[int] = []
        """Steps of checkpoints that were found damaged on disk, ..."""
        self.damaged_in_memory: list[int] = []
        """... and in host memory."""
        self.not_finite: list[tuple[int, tuple[str, ...]]] = []
        """Steps of all checkpoints with NaN or Inf where that is not meant, and in which arrays."""
        self._damaged_paths: set[str] = set()
        self.failed = 0
        """Saves that failed."""
        self.unsaved: set[int] = set()
        """Their steps, where no later save has."""
        self.trouble = ""
        """Why the last of them did."""

    # -- the store as it stands -----------------------------------------------------------------

    def listed(self) -> list[Saved]:
        """The checkpoints, those of a branch that was given up as quarantined.

        Raises:
            StoreError: they cannot be listed, and none is in memory.
        """
        return self._pending_quarantine.applied(self.store.steps())

    def take_stock(self) -> None:
        """Reads the store: after a start, and after a rollback."""
        self._verifier.drop()
        try:
            saves = self.listed()
        except StoreError as error:
            saves = []
            self._problem(None, f"the checkpoints cannot be listed: {error}")
        self.catalog.read(saves)
        self._deleted.clear()
        self.good = max((s.step for s in saves if s.status == "good"), default=None)
        self._told_good = {s.step for s in saves if s.status == "good"}
        self._near_only.clear()
        self._not_finite.clear()

    # -- saving ---------------------------------------------------------------------------------

    def due(self, step: int, taken: int = 1) -> bool:
        """Whether to save after `step` steps, the last `taken` of which came at once."""
        return step // self.every != (step - taken) // self.every

    def save(
        self, step: int, state: Mapping[str, Any], healing: Mapping[str, Any], why: str
    ) -> None:
        """Saves. A disk that fails does not end the training: it is told, and the last good stays.

        While a slow disk is still at the save before, a regular save goes to memory only, or is
        left out where there is none. What the background meets comes later, see `look_after`.

        Raises:
            UnsavableState: there is something in the state that no checkpoint can hold. Only at the
                first save: later a run has more to lose than a checkpoint.
        """
        late = why in _UNHURRIED and any(self._ranks.gather(self._wait_limit.late(self.store)))
        save: Any = getattr(self.store, "save_in_memory", None) if late else self.store.save
        if late:
            kept = "left out" if save is None else "only in memory"
            told = f"the disk is still at the save before: checkpoint {step} is {kept}"
            self._not_saved(step, told, told)
        if save is None:
            return
        began = time.monotonic()
        try:
            save(step, state, healing=healing)
        except UnsavableState as error:
            if not self._saved_once:
                raise
            self._failed(step, error)
            return
        except (StoreError, OSError) as error:
            self._failed(step, error)
            return
        self._saved_once = True
        self.unsaved.discard(step)
        (self._near_only.add if late else self._near_only.discard)(step)
        self.catalog.saved(step)
        self._log_event("save", step=step, why=why, seconds=round(time.monotonic() - began, 6))
        if self._pending_quarantine:
            self._verifier.later(self.store, step, self._quarantine_pending)

    def in_memory_only(self, step: int) -> bool:
        """Whether a checkpoint is missing on a disk that was too slow. Waits for the disk."""
        if not hasattr(self.store, "save_in_memory"):
            return False
        self.settle()  # a write that is under way may still succeed
        return any(saved.step == step and saved.path is None for saved in self.listed())

    # -- known-good -----------------------------------------------------------------------------

    def look_after(self, ledger: Ledger, step: int) -> None:
        """Once per step: what the background has met, and which checkpoints to prove next.

        Which, and from when on, follows from the steps alone; nothing here waits for a disk.
        """
        for failure in self.store.failures():
            self._failed(failure.step, failure)
        self._hear()
        if ledger.open:
            return
        self._prove(self._agreed(ledger), ledger)
        ledger.forget(min(self.catalog.waiting, default=step))

    def catch_up(self, ledger: Ledger, *, before: int) -> None:
        """Proves all whose probation was over before a step, and waits. On every rank together.

        Where a rollback goes must follow from the steps, not from how fast a disk is.
        """
        everybody = self._ranks.gather(self.catalog.ready(ledger, before))
        self._prove(sorted(set.intersection(*map(set, everybody))), ledger)
        self._verifier.finish()
        self._hear()

    def wrap_up(self, ledger: Ledger, step: int) -> None:
        """The last `look_after` of a run, with all that comes of it."""
        self.look_after(ledger, step)
        self._verifier.finish()
        self._hear()

    def _agreed(self, ledger: Ledger) -> list[int]:
        """Those whose probation is over, on every rank the same.

        Ranks notice a failed write at different steps. They exchange now and then, and at the same
        step everywhere, whether one has something or not.
        """
        if self._ranks.world == 1:
            return self.catalog.ready(ledger)
        if ledger.judged % max(1, self.every // 2):
            return []
        everybody = self._ranks.gather(self.catalog.ready(ledger))
        return sorted(set.intersection(*map(set, everybody)))

    def _prove(self, ready: Sequence[int], ledger: Ledger) -> None:
        """Asks for the proofs, and for the deletions once the last of them has succeeded."""
        if not ready:
            return
        surplus = agreed(self._ranks, self.catalog.prove(ready, ledger))
        for step in ready:
            tidy = self._deleting(surplus) if step == ready[-1] else _nothing
            self._verifier.ask(self.store, step, tidy, near_only=step in self._near_only)
            self._near_only.discard(step)

    def _deleting(self, surplus: Sequence[int]) -> Callable[[Any], None]:
        """What deletes them in one tier. What a tier has to keep is asked for again next time."""

        def tidy(tier: Any) -> None:
            for step in surplus:
                with suppress(NotThere, LastGoodKept):
                    tier.delete(step)
            if tier is getattr(self.store, "disk", self.store):  # memory lets go by itself
                self._deleted.append({*surplus} - {saved.step for saved in tier.steps()})

        return tidy

    def _hear(self) -> None:
        """Takes what has come of proofs."""
        for step, error in self._verifier.verdicts():
            if error is None:
                self.good = max(step, self.good or 0)
                if step not in self._told_good:
                    self._told_good.add(step)
                    self._log_event("good", step=step)
            elif isinstance(error, CheckpointDamaged):
                self.note_damage(error)
                elsewhere = step in self._told_good or getattr(self.store, "disk", None)
                if not elsewhere:
                    self.catalog.damaged(step)
            elif isinstance(error, NotFinite):
                self._note_not_finite(step, error.names)
            else:
                self._log_event("problem", step=step, problem=str(error))
        while self._deleted:
            self.catalog.deleted(self._deleted.popleft())
        while self._set_aside_late:
            step = self._set_aside_late.popleft()
            self._log_event("quarantine", step=step, checkpoint=step)

    # -- what is not finite ---------------------------------------------------------------------

    def found_not_finite(self) -> dict[int, tuple[str, ...]]:
        """Checkpoints with NaN or Inf where that is not meant, since the last rollback or start.

        Step -> arrays. Those in memory are all known by now; those on disk alone once they are
        written. On every rank together, and the same everywhere.
        """
        look: Any = getattr(self.store, "nonfinite_found", list)
        for step, names in look():
            self._note_not_finite(step, names)
        united: dict[int, tuple[str, ...]] = {}
        for each in self._ranks.gather(self._not_finite):
            for step, names in each.items():
                united[step] = tuple(dict.fromkeys((*united.get(step, ()), *names)))
        return united

    def _note_not_finite(self, step: int, names: Sequence[str]) -> None:
        """A checkpoint with NaN in it looks like any other until it is needed."""
        self.catalog.not_finite(step)
        if step in self._not_finite:
            return
        told = f"checkpoint {step} is not finite in {', '.join(names[:3])}"
        self._log_event("problem", step=step, problem=told)
        if not self.not_finite:
            self.warn(
                f"{told}: it can never be known-good. A skipped step does not take back what the "
                "forward pass has written; arrays that are meant to be so go into nonfinite_ok"
            )
        self._not_finite[step] = tuple(names)
        self.not_finite.append((step, tuple(names)))

    def accept_first(self, state: Mapping[str, Any]) -> list[str]:
        """Arrays that are not finite before the first step are meant to be so: masks of -inf.

        Returns:
            Their names.
        """
        look: Any = getattr(self.store, "nonfinite_in", lambda state: ())
        names = sorted({name for found in self._ranks.gather(look(state)) for name in found})
        self.accept(names)
        return names

    def accept(self, names: list[str]) -> None:
        """Arrays that may hold NaN and Inf."""
        store: Any = self.store
        if names and hasattr(store, "nonfinite_ok"):
            store.nonfinite_ok = (*store.nonfinite_ok, *names)

    # -- trouble --------------------------------------------------------------------------------

    def set_aside(self, steps: list[int], *, now: int) -> None:
        """Quarantines checkpoints; those that are gone, or quarantined already, are fine.

        A disk that cannot be written does not keep the run from going back: see `quarantine_later`.
        """
        self._verifier.finish()
        saves = self.listed()
        todo = [s.step for s in saves if s.step in steps and s.status != "quarantined"]
        for step in agreed(self._ranks, todo):
            try:
                self.store.mark(step, "quarantined")
            except (StoreError, OSError) as error:
                self._disk_failed = True
                self._problem(now, f"checkpoint {step} could not be quarantined: {error}")
            else:
                self._log_event("quarantine", step=now, checkpoint=step)
        self._hear_trouble(now)

    def quarantine_later(self, target: int) -> None:
        """The run is back at `target`. What could not be quarantined on disk is so later."""
        self._hear_trouble(target)
        failed, self._disk_failed = any(self._ranks.gather(self._disk_failed)), False
        if failed:
            self._pending_quarantine.add(target)

    def _quarantine_pending(self, tier: Any) -> None:
        self._set_aside_late += self._pending_quarantine.settle(tier)

    def _hear_trouble(self, now: int) -> None:
        """What one tier of the store has made up for in another."""
        look: Any = getattr(self.store, "trouble", list)
        told = set()
        for error in look():
            if isinstance(error, CheckpointDamaged):
                self.note_damage(error)
                self.warn(f"{error}; another copy of it was used")
                continue
            self._disk_failed = True
            if str(error) not in told:
                told.add(str(error))
                self._problem(now, f"{error}; the run goes on with what is in memory")

    def note_damage(self, error: CheckpointDamaged) -> None:
        """Tells of a checkpoint whose bytes are not those that were saved, once."""
        if error.path in self._damaged_paths:
            return
        if error.path != WHERE:  # a directory's name is never used again
            self._damaged_paths.add(error.path)
        (self.damaged_in_memory if error.path == WHERE else self.damaged).append(error.step)
        self._log_event("damaged", step=error.step, problem=str(error))

    def settle(self) -> None:
        """Waits for what is being written and proven; failures are told."""
        while True:
            try:
                self.store.wait()
            except SaveFailed as failure:
                self._failed(failure.step, failure)
            else:
                break
        self._verifier.finish()

    def close(self) -> None:
        """Waits for the background."""
        self._verifier.drop()

    def _problem(self, step: int | None, told: str) -> None:
        self._log_event("problem", step=step, problem=told)
        self.warn(told)

    def _failed(self, step: int, error: Exception) -> None:
        self.catalog.failed(step)
        self.unsaved.add(step)
        self._not_saved(
            step, str(error), f"checkpoint {step} was not saved, training goes on: {error}"
        )

    def _not_saved(self, step: int, problem: str, line: str) -> None:
        self.failed += 1
        self.trouble = problem
        self._log_event("save_failed", step=step, problem=problem)
        if self.failed & (self.failed - 1) == 0:  # the 1st, 2nd, 4th, ...: a full disk stays full
            self.warn(line)


def _nothing(tier: Any) -> None:
    """What is deleted after a proof that others follow."""
