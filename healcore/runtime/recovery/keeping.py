"""Checkpoints while all is well: when to save, which are known-good by now, which may go."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from healcore.runtime.incidents.ledger import Ledger
from healcore.runtime.recovery.choice import proven
from healcore.runtime.recovery.proving import Prover
from healcore.runtime.store import (
    CheckpointDamaged,
    CheckpointStore,
    Keep,
    NotThere,
    Saved,
    SaveFailed,
    StoreError,
    UnsavableState,
    superfluous,
)
from healcore.runtime.store.ranks import Ranks, agreed

Tell = Callable[..., object]
"""Writes an event: ``tell(kind, step=..., **fields)``."""

_PATIENCE_S = 5.0
"""How long a save waits for the one before it."""


class Keeper:
    """Looks after the checkpoints of one run.

    Args:
        store: where they are.
        every: steps between two saves.
        keep: how many of each kind stay.
        probation: healthy steps until one is known-good.
        region: steps within which trouble is the same trouble.
        prover: verifies behind the training loop.
        ranks: the processes of this run.
        tell: takes events.
        warn: takes lines for a person.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        every: int,
        keep: Keep,
        probation: int,
        region: int,
        prover: Prover,
        ranks: Ranks,
        tell: Tell,
        warn: Callable[[str], object],
    ) -> None:
        self.store = store
        self.every = every
        self.keep = keep.checked()
        self.probation = probation
        self._region = region
        self._prover = prover
        self._ranks = ranks
        self._tell = tell
        self._warn = warn
        self._saved_once = False
        self._not_finite: set[int] = set()
        self._patience_s = _PATIENCE_S
        self._waiting: dict[int, Saved] = {}
        self.good: int | None = None
        """Step of the newest known-good checkpoint."""
        self.damaged: list[int] = []
        """Steps of checkpoints that were found damaged."""
        self.failed = 0
        """Saves that failed."""
        self.unsaved: set[int] = set()
        """Their steps, where no later save has."""
        self.trouble = ""
        """Why the last of them did."""

    def take_stock(self) -> list[Saved]:
        """Reads the store: after a start, and after a rollback."""
        self._prover.drop()
        saves = self.store.steps()
        self._waiting = {s.step: s for s in saves if s.status == "candidate" and s.finite}
        self.good = max((s.step for s in saves if s.status == "good"), default=None)
        return saves

    def due(self, step: int) -> bool:
        """Whether to save after `step` steps.

        Not while the save before is still being written: waiting for a slow disk would hold up the
        training. The next regular save comes when its time has come.
        """
        if step % self.every:
            return False
        busy = any(self._ranks.gather(self._busy()))
        if busy:
            self._tell("save_failed", step=step, problem="the save before is still being written")
        return not busy

    def _busy(self) -> bool:
        """Whether the save before is still being written, after a moment's patience.

        Waited in vain once, it does not wait again until the disk has kept up.
        """
        deadline = time.monotonic() + self._patience_s
        while getattr(self.store, "busy", False):
            if time.monotonic() >= deadline:
                self._patience_s = 0.0
                return True
            time.sleep(0.001)
        self._patience_s = _PATIENCE_S
        return False

    def save(
        self, step: int, state: Mapping[str, Any], healing: Mapping[str, Any], why: str
    ) -> None:
        """Saves. A disk that fails does not end the training: it is told, and the last good stays.

        What the background meets comes later, see `look_after`.

        Raises:
            UnsavableState: there is something in the state that no checkpoint can hold. Only at the
                first save: later a run has more to lose than a checkpoint.
        """
        began = time.monotonic()
        try:
            self.store.save(step, state, healing=healing)
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
        # As it will be listed; `finite` is known, and asked for, when its probation is over.
        self._waiting[step] = Saved(step, "candidate", True, 0, 0.0, True, None)
        self._tell("save", step=step, why=why, seconds=round(time.monotonic() - began, 6))

    def look_after(self, ledger: Ledger, step: int) -> None:
        """Once per step: failures, verdicts of the prover, and the next one to prove."""
        for failure in self.store.failures():
            self._failed(failure.step, failure)
        verdict = self._prover.verdict()
        if verdict is not None:
            self._judge(*verdict, ledger)
        if ledger.open or self._prover.busy:
            return
        ready = self._agreed(ledger)
        if ready:
            self._prover.begin(self.store, ready[0])
        ledger.forget(min(self._waiting, default=step))

    def _agreed(self, ledger: Ledger) -> list[int]:
        """`_ready`, on every rank the same.

        Ranks notice a failed write, or a new file on a network disk, at different steps. They
        exchange now and then, and at the same step everywhere, whether one has something or not.
        """
        if self._ranks.world == 1:
            return self._ready(ledger)
        if ledger.judged % max(1, self.every // 2):
            return []
        everybody = self._ranks.gather(self._ready(ledger))
        return sorted(set.intersection(*map(set, everybody)))

    def catch_up(self, ledger: Ledger, *, before: int) -> None:
        """Proves at once all whose probation was over before a step. On every rank together.

        Where a rollback goes must follow from the steps, not from how fast a disk is.
        """
        while True:
            self._prover.finish()
            verdict = self._prover.verdict()
            if verdict is not None:
                self._judge(*verdict, ledger)
            everybody = self._ranks.gather(self._ready(ledger, before))
            ready = set.intersection(*map(set, everybody))
            if not ready:
                return
            self._prover.begin(self.store, min(ready))

    def _ready(self, ledger: Ledger, before: int | None = None) -> list[int]:
        """Steps whose probation is over. The store is asked only when there may be one."""
        if not self._waiting:
            return []
        now = ledger.judged if before is None else min(before, ledger.judged)
        facts = {"unhealthy": ledger.unhealthy, "now": now, "probation": self.probation}
        if not proven(list(self._waiting.values()), **facts):
            return []
        saves = self.store.steps()
        self._note_not_finite(saves)
        there = {s.step for s in saves if s.status == "candidate" and s.finite}
        self._waiting = {step: s for step, s in self._waiting.items() if step in there}
        return proven([s for s in saves if s.step in self._waiting], **facts)

    def _note_not_finite(self, saves: list[Saved]) -> None:
        """A checkpoint with NaN in it looks like any other until it is needed."""
        fresh = [s for s in saves if not s.finite and s.step not in self._not_finite]
        for saved in fresh:
            told = f"checkpoint {saved.step} is not finite in {', '.join(saved.nonfinite[:3])}"
            self._tell("problem", step=saved.step, problem=told)
        if fresh and not self._not_finite:
            self._warn(
                f"{told}: it can never be known-good. A skipped step does not take back what the "
                "forward pass has written; arrays that are meant to be so go into nonfinite_ok"
            )
        self._not_finite.update(saved.step for saved in fresh)

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

    def _prune(self, ledger: Ledger) -> None:
        """Deletes what need not be kept.

        While the region of the last rollback lasts, where it went and the next one deeper stay: a
        second one in the same region goes there, and not to what became good on the way. And what
        only waits for the prover is as good as good: a slow disk must not thin it out.
        """
        saves = self.store.steps()
        facts = {"unhealthy": ledger.unhealthy, "now": ledger.judged, "probation": self.probation}
        stay = {*proven(saves, **facts)[-self.keep.good :]}
        if ledger.earlier and ledger.judged < ledger.earlier[-1].onset + self._region:
            target = ledger.earlier[-1].target
            deeper = [s.step for s in saves if s.status == "good" and s.step < target]
            stay |= {target, *deeper[-1:]}
        surplus = [step for step in superfluous(saves, self.keep) if step not in stay]
        for step in agreed(self._ranks, surplus):
            self.store.delete(step)
            self._waiting.pop(step, None)

    def _judge(self, step: int, error: Exception | None, ledger: Ledger) -> None:
        self._waiting.pop(step, None)
        try:
            if error is None:
                self.store.mark(step, "good")
                self.good = max(step, self.good or 0)
                self._tell("good", step=step)
                self._prune(ledger)
                return
            if isinstance(error, CheckpointDamaged):
                self.note_damage(error)
                self.store.mark(step, "quarantined")
            elif not isinstance(error, NotThere):
                self._tell("problem", step=step, problem=str(error))
        except (StoreError, OSError) as trouble:
            self._tell("problem", step=step, problem=str(trouble))

    def set_aside(self, steps: list[int], *, now: int) -> None:
        """Quarantines checkpoints; those that are gone, or quarantined already, are fine."""
        self._prover.finish()
        saves = self.store.steps()
        todo = [s.step for s in saves if s.step in steps and s.status != "quarantined"]
        for step in agreed(self._ranks, todo):
            self.store.mark(step, "quarantined")
            self._tell("quarantine", step=now, checkpoint=step)

    def note_damage(self, error: CheckpointDamaged) -> None:
        """Tells of a checkpoint whose bytes are not those that were saved."""
        self.damaged.append(error.step)
        self._tell("damaged", step=error.step, problem=str(error))

    def settle(self) -> None:
        """Waits for what is being written; failures are told."""
        self._prover.finish()
        while True:
            try:
                self.store.wait()
            except SaveFailed as failure:
                self._failed(failure.step, failure)
            else:
                return

    def close(self) -> None:
        """Ends the prover's thread."""
        self._prover.close()

    def _failed(self, step: int, error: Exception) -> None:
        self.failed += 1
        self.unsaved.add(step)
        self.trouble = str(error)
        self._waiting.pop(step, None)
        self._tell("save_failed", step=step, problem=str(error))
        if self.failed & (self.failed - 1) == 0:  # the 1st, 2nd, 4th, ...: a full disk stays full
            self._warn(f"checkpoint {step} was not saved, training goes on: {error}")
