"""What happens between two steps of a run."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from healcore.core.verdict import names
from healcore.runtime.checkpoints.manager import CheckpointManager
from healcore.runtime.data import BatchId
from healcore.runtime.data.feeds import Feeds
from healcore.runtime.driver import Driver, PendingDispatch
from healcore.runtime.events import Log
from healcore.runtime.events.metrics import Metrics
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.assessment import HIGH, Assessor
from healcore.runtime.incidents.delayed_reader import DelayedReader, JudgedStep, TakenDispatch
from healcore.runtime.incidents.hooks import Hooks
from healcore.runtime.incidents.incident import Facts
from healcore.runtime.incidents.judge import Judge, Order
from healcore.runtime.ledger import Ledger
from healcore.runtime.loop.casework import case_of
from healcore.runtime.loop.console_log import ConsoleLog
from healcore.runtime.loop.orders import Orders
from healcore.runtime.loop.reruns import Reruns
from healcore.runtime.loop.save_schedule import SaveSchedule
from healcore.runtime.loop.state_check import StateCheck
from healcore.runtime.loop.termination import TerminationWatch, ending
from healcore.runtime.postmortem.diagnosis import Case
from healcore.runtime.rollback.host_state import HostParts
from healcore.runtime.rollback.journal import Journal
from healcore.runtime.rollback.manager import RollbackManager
from healcore.runtime.store import StoreError
from healcore.runtime.store.claim import Claim
from healcore.runtime.store.ranks import Ranks

_FEW_UNHEARD = 10
_UNHEARD = 100
"""Batches without a step after which it is asked whether that is meant: it may be accumulation."""


class Loop:
    """The live part of a `Healer`. One thread."""

    def __init__(
        self,
        *,
        policy: HostPolicy,
        driver: Driver,
        ranks: Ranks,
        checkpoints: CheckpointManager,
        rollbacks: RollbackManager,
        journal: Journal,
        ledger: Ledger,
        feeds: Feeds,
        reader: DelayedReader,
        hooks: Hooks,
        log: Log,
        metrics: Metrics,
        console: ConsoleLog,
        rerun: bool,
        loss_fn: Callable[..., Any] | None,
    ) -> None:
        self.policy = policy
        self.driver = driver
        self.ranks = ranks
        self.checkpoints = checkpoints
        self.rollbacks = rollbacks
        self.journal = journal
        self.ledger = ledger
        self.feeds = feeds
        self.log = log
        self.metrics = metrics
        self.log_event = log.write
        self.console = console
        self.termination = TerminationWatch()
        self.claim: Claim | None = None
        """On the store's directory."""
        self.abandoned: weakref.finalize[..., Loop] | None = None
        """Clears up where the block of its Healer is never left."""
        self.step = 0
        self.began = time.monotonic()
        self.judge = Judge(
            policy=policy,
            ledger=ledger,
            hooks=hooks,
            ranks=ranks,
            log_event=self.log_event,
            facts=self._facts,
        )
        self.reruns = Reruns(
            wanted=rerun,
            region=policy.region,
            feeds=feeds,
            ledger=ledger,
            journal=journal,
            log_event=self.log_event,
            info=console.info,
        )
        self._reader = reader
        self._assessor = Assessor(driver, loss_fn, self.warn)
        self._batch: Any = None
        """The batch that the loop is at."""
        # Ranks see different losses, and would not find the same.
        self._asks = loss_fn is not None and policy.confirm and ranks.world == 1
        self._looks_back = self._asks and policy.goes_back_for(HIGH)
        self._orders = Orders(
            policy=policy,
            driver=driver,
            ranks=ranks,
            ledger=ledger,
            rollbacks=rollbacks,
            judge=self.judge,
            reader=reader,
            reruns=self.reruns,
            log_event=self.log_event,
            console=console,
            case=lambda why: self.case("stopped", why),
            assessor=self._assessor,
        )
        self._state_check = StateCheck(
            policy=policy,
            driver=driver,
            checkpoints=checkpoints,
            judge=self.judge,
            ranks=ranks,
            log_event=self.log_event,
            warn=self.warn,
        )
        self._saves = SaveSchedule(
            driver, checkpoints, rollbacks, ledger, observes=policy.observes, warn=self.warn
        )
        self._ids: dict[int, list[BatchId]] = {}
        """Of each loader the batches since its last step."""
        self._yielded = 0
        """The loader whose batch the loop is at."""
        self._generators: HostParts | None = None
        self._resumed_at: int | None = None

    # -- the beginning, see `start` ----------------------------------------------------------

    def land(self, step: int, generators: HostParts | None) -> None:
        """The state is that of a checkpoint of an earlier process.

        Args:
            step: the checkpoint's.
            generators: what it holds for `HostState.put_back`.
        """
        self.step, self._generators = step, generators
        self._restore_generators()

    def begins_at(self, step: int, *, resumed: bool) -> None:
        """What this process goes on from."""
        self.rollbacks.began_at = step
        self._saves.begins_at(step)
        self._resumed_at = step if resumed else None

    def note_rates(self) -> None:
        """The multipliers in force are nothing new."""
        engines = self.driver.healing().items()
        self.judge.goes_on({name: each["state"]["lr"]["scale"] for name, each in engines})

    # -- the loop -------------------------------------------------------------------------------

    def batches(self, loader: Any, epochs: int | None) -> Iterator[Any]:
        """See `Healer.batches`."""
        self.after_step()  # of a loop that has broken off
        number = self.feeds.feed(loader, epochs)
        self._restore_generators()
        for line in self.feeds.told:
            self.log_event("data", step=self.step, outcome=line)
            self.console.info(f"data: {line}")
        self.feeds.told.clear()
        while True:
            try:
                batch, name = self._next(number)
            except StopIteration:
                # What is still on its way may send the run back into this data.
                # Ranks need not come by here together: an evaluation may be one rank's alone.
                alone = self.ranks.world == 1
                if not (self._read(all=True) or (alone and self._leave_bad_state())):
                    break
                continue
            finally:
                self._note_skipped(number)
            self._yielded = number
            self._ids.setdefault(number, []).append(name)
            self._generators = None
            self._batch = batch
            yield batch
            self.after_step()
            if number == self.feeds.current and self._unheard == _UNHEARD:
                self._warn_unheard()
        self.feeds.close(number)

    def after_step(self) -> bool:
        """See `Healer.after_step`."""
        pending = self.driver.poll_step()
        if pending is not None:
            self._push(pending)
            if self._read() or self._save_when_due():
                return True
            self.checkpoints.look_after(self.ledger, self.step)
        self._tell_notes()
        # In the middle of an accumulation the state cannot be saved: on to its end.
        asked = self.termination.asked
        if asked is not None and (self.whole or self._unheard >= _UNHEARD):
            raise ending(asked)
        return False

    @property
    def whole(self) -> bool:
        """Whether no step is under way: the state is that of `step`, and so is the data's place."""
        return not self._unheard

    @property
    def _unheard(self) -> int:
        """Batches of the loader in use since the last step."""
        return len(self._ids.get(self._yielded, ()))

    def _next(self, number: int) -> tuple[Any, BatchId]:
        if not self.whole:
            return self.feeds.next(number)
        with self.termination.idle():
            return self.feeds.next(number)

    def _push(self, pending: PendingDispatch) -> None:
        """A step was taken, with the batches of the loader that was asked last."""
        ids = self._ids.pop(self._yielded, [])
        self.feeds.stepped(self._yielded, ids[-1] if ids else None)
        batch = self._batch if self._asks and ids else None
        self._reader.push(TakenDispatch(self.step, pending, tuple(ids), batch))
        self.step += pending.count
        self._saves.stepped(pending.count)

    def _read(self, *, all: bool = False) -> bool:
        """Reads the steps that are due; whether the run has gone back."""
        for step in self._reader.due(all=all):
            self._recount()
            self._note_metrics(step)
            order = self.judge.judge(step)
            if step.batch is not None:
                self._assessor.see(step.index, step.batch, step.records)
            self.reruns.watch(step.index, order)
            if order is None and not self._looks_back:
                continue
            orders = self._orders
            carried = (
                orders.look_back(self.step) if order is None else orders.carry_out(order, self.step)
            )
            if carried.target is not None:
                self._go_on_from(carried.target)
                return True
            if carried.save:
                self.save("ordered")
        return False

    def _recount(self) -> None:
        """A dispatch had more or fewer steps than were counted, see `PendingDispatch.count`."""
        more = self._reader.miscounted()
        self.step += more
        self._saves.stepped(more)

    def _note_metrics(self, step: JudgedStep) -> None:
        for record in step.records:
            self.metrics.write(step.index, record, several=len(step.records) > 1)

    def _go_on_from(self, target: int, order: Order | None = None) -> None:
        self.step = target
        self._saves.begins_at(target)
        self._state_check.went_back(order)
        self._reader.clear()
        self._assessor.went_back(target)
        self.metrics.went_back()
        self._ids.clear()
        self.note_rates()

    # -- saving ---------------------------------------------------------------------------------

    def save(self, why: str) -> None:
        """A checkpoint of this step."""
        self._saves.save(self.step, why)

    def save_last(self) -> None:
        """A checkpoint of where the run ends, if the last one is older."""
        self._saves.save_last(self.step)

    def _save_when_due(self) -> bool:
        """A regular save, when its time has come; whether the run has gone back instead."""
        if not self._saves.due(self.step):
            return False
        # Unread steps might bring an order, which a start from this save would never get. It does
        # not hold up more than the save: that waits for the device anyway.
        if self._read(all=True):
            return True
        if self._saves.undisturbed(self.step):
            if self._leave_bad_state():
                return True
            self.save("regular")
        return False

    def _leave_bad_state(self) -> bool:
        """Whether the run has gone back because the saves so far are not finite."""
        order = self._state_check.order(self.step)
        if order is None:
            return False
        carried = self._orders.carry_out(order, self.step)
        if carried.target is None:
            return False
        self._go_on_from(carried.target, order)
        return True

    # -- the end, see `shutdown` -----------------------------------------------------------------

    def drain(self) -> None:
        """Reads what is left at the end of a run. Nothing is carried out any more."""
        pending = self.driver.poll_step()
        if pending is not None:
            self._push(pending)
        self._tell_notes()
        if self._unheard >= _FEW_UNHEARD:
            self._warn_unheard()
        if self.step == self._resumed_at:
            self.warn(f"no step was taken: the data had been used up at step {self.step}")
        for step in self._reader.due(all=True):
            self._recount()
            self._note_metrics(step)
            order = self.judge.judge(step)
            if order is not None:
                what = ", ".join(names(order.action))
                told = f"{what} came with the last steps of the run and was not carried out"
                self.log_event("problem", step=step.index, problem=told)

    def note_ending(self, ending: str) -> None:
        """The journal knows how the process ended; if it does not, it was killed."""
        self.journal.page.ended = ending
        self.rollbacks.write_journal(self.step)

    def case(self, ending: str, why: str = "", exception: str | None = None) -> Case:
        """What is known of the run, for a diagnosis."""
        return case_of(
            self.judge,
            self.checkpoints,
            ending=ending,
            step=self.step,
            tried=self._orders.tried,
            verdict=self.reruns.verdict,
            why=why,
            exception=exception,
        )

    def release(self) -> None:
        """Gives the store's directory back. The run has ended and leaves nothing to clear up."""
        if self.abandoned is not None:
            self.abandoned.detach()
        if self.claim is not None:
            self.claim.release()

    # -- what a person should know --------------------------------------------------------------

    def warn(self, told: str) -> None:
        """An event, and a line."""
        self.log_event("problem", step=self.step, problem=told)
        self.console.warning(told)

    def _warn_unheard(self) -> None:
        """A forgotten `healer.update`, or an optimizer that is not in the state."""
        self.warn(
            f"{self._unheard} batches and no step: in JAX call healer.update(state) after each "
            "step, in torch the optimizer that steps has to be in the state"
        )

    def _tell_notes(self) -> None:
        """What the driver has noticed beside the steps."""
        notes: list[str] = getattr(self.driver, "notes", [])
        while notes:
            self.warn(notes.pop(0))

    def _note_skipped(self, number: int) -> None:
        skipped = self.feeds.skipped(number)
        if skipped:
            self.log_event(
                "skipped_batches", step=self.step, batches=[list(each) for each in skipped]
            )
            self.console.info(f"step {self.step}: {len(skipped)} batches left out")

    # -- within ---------------------------------------------------------------------------------

    def _restore_generators(self) -> None:
        """Sets random generators to the checkpoint's; loaders that were put back have drawn some.

        Right after a restart, and again with each loader until there is a first batch.
        """
        if self._generators is not None:
            self.rollbacks.host.put_back(self._generators)

    def _facts(self) -> Facts:
        try:
            saves = self.checkpoints.listed()
        except StoreError:
            saves = []
        return Facts(
            run=self.log.run,
            policy=self.policy.name,
            observes=self.policy.observes,
            framework=self.driver.framework,
            rank=self.ranks.rank,
            learning_rate=self.driver.learning_rate(),
            rollbacks=self.journal.page.rollbacks,
            last_good=self.checkpoints.good,
            checkpoints=tuple(saves),
        )
