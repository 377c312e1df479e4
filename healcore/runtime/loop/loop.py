"""What happens between two steps of a run."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from healcore.console import counted
from healcore.core.verdict import Action, Cause, names
from healcore.events.metrics import Metrics
from healcore.events.models import Ending
from healcore.runtime.checkpoints.host_state import HostParts
from healcore.runtime.checkpoints.manager import CheckpointManager
from healcore.runtime.data import BatchId
from healcore.runtime.data.loader_registry import LoaderRegistry
from healcore.runtime.dominance.anchor import ObservedBatch, TrainedStep
from healcore.runtime.dominance.dominance import Dominance, Verdict
from healcore.runtime.driver import Driver, PendingDispatch
from healcore.runtime.hang_guard import HangGuard
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.delayed_reader import DelayedReader, QueuedDispatch, StepResult
from healcore.runtime.incidents.hooks import Hooks
from healcore.runtime.loop.fault_answers import FaultAnswers
from healcore.runtime.loop.last_state import LastState
from healcore.runtime.loop.out_of_memory import OutOfMemory
from healcore.runtime.loop.run_facts import run_end, run_facts, stop
from healcore.runtime.loop.run_settings import change_of_batch_size
from healcore.runtime.loop.saves import SaveSchedule, StateCheck
from healcore.runtime.loop.stop_file import StopFile
from healcore.runtime.loop.termination import EndRequested, TerminationWatch, exit_for
from healcore.runtime.loop.votes import Proposal, Severity, Votes
from healcore.runtime.postmortem.rank_notes import RankNotes
from healcore.runtime.recovery.journal import Journal
from healcore.runtime.recovery.ledger import LASTING, Ledger
from healcore.runtime.recovery.monitor import IncidentMonitor
from healcore.runtime.recovery.recovery import Recovery
from healcore.runtime.recovery.restoring import Restorer
from healcore.runtime.recovery.rollback import Rollback, Status
from healcore.runtime.run_log import RunLog
from healcore.runtime.store.claim import Claim
from healcore.runtime.store.ranks import Ranks

_MIN_WITHOUT_STEP = 10
"""Batches without a step that are reported at the end of a run."""
_MAX_WITHOUT_STEP = 100
"""Batches without a step that are reported at once: fewer may be gradient accumulation."""


@dataclass(eq=False, kw_only=True)
class Loop:
    """The running part of a `Healer`. Not thread-safe."""

    policy: HostPolicy
    driver: Driver
    ranks: Ranks
    checkpoints: CheckpointManager
    restorer: Restorer
    journal: Journal
    ledger: Ledger
    loaders: LoaderRegistry
    reader: DelayedReader
    hooks: Hooks
    log: RunLog
    metrics: Metrics
    rerun: bool
    loss_fn: Callable[..., Any] | None
    has_trainer: bool
    """A trainer owns the loop: whatever ends its training early is no `break`."""
    stop_file: StopFile
    claim: Claim | None
    """On the store's directory."""

    def __post_init__(self) -> None:
        policy, driver, ranks, ledger = self.policy, self.driver, self.ranks, self.ledger
        self.guard = HangGuard()
        self.notes = RankNotes(None, "")
        """What the other ranks leave for rank 0."""
        self.votes = Votes(driver, ranks, self.reader.lag, self.log)
        self.termination = TerminationWatch(self.votes.propose_end if self.votes.possible else None)
        self._proposed_end = False
        """This rank has seen the stop file."""
        self.ends_together = False
        """The ranks have agreed to end after this step."""
        self.finalizer: weakref.finalize[..., Loop] | None = None
        """Cleans up if the `with` block of the Healer is never left."""
        self.step = 0
        self.steps_taken = 0
        """Steps of this process, including steps that a rollback has undone."""
        self.polled = False
        """The loop has called `batches`, `after_step` or `update`."""
        self.had_completed = False
        """The run in the store had completed, and this process has its last state."""
        self.began = time.monotonic()
        self.monitor = IncidentMonitor(
            policy=policy,
            ledger=ledger,
            hooks=self.hooks,
            ranks=ranks,
            log=self.log,
            facts=partial(run_facts, self),
            learning_rate=driver.learning_rate,
            interval=self.checkpoints.every,
        )
        self.dominance = Dominance(
            driver=driver,
            loss_fn=self.loss_fn if policy.goes_back_for() else None,
            ranks=ranks,
            threshold=policy.evidence,
            interval=self.checkpoints.every,
            warn=self.warn,
            log=self.log,
            learning_rate=self._rate_in_force,
        )
        self.faults = FaultAnswers(
            policy=policy,
            loaders=self.loaders,
            ranks=ranks,
            host=self.restorer.host,
            termination=self.termination,
            log=self.log,
            step=lambda: self.step,
        )
        self._loop_names_batches = False
        """The loop calls `Healer.loss`, or `observe` with a batch."""
        self._contents: dict[int, list[ObservedBatch]] = {}
        """Number of a loader -> its batches since the last step, if weights are compared on them.
        """
        self.recovery = Recovery(
            policy=policy,
            driver=driver,
            ranks=ranks,
            ledger=ledger,
            log=self.log,
            monitor=self.monitor,
            reader=self.reader,
            stop=self.stop,
            compares=lambda: self.dominance.asks,
            restorer=self.restorer,
            reruns=self.rerun,
        )
        self.out_of_memory = OutOfMemory(
            policy=policy,
            driver=driver,
            ranks=ranks,
            ledger=ledger,
            restorer=self.restorer,
            log=self.log,
            step=lambda: self.step,
            run_end=partial(run_end, self, Ending.STOPPED, fault=Cause.OOM),
            on_redo=self._forget_parts,
        )
        self._state_check = StateCheck(
            policy=policy,
            driver=driver,
            checkpoints=self.checkpoints,
            monitor=self.monitor,
            ranks=ranks,
            log=self.log,
        )
        self._saves = SaveSchedule(
            driver=driver,
            checkpoints=self.checkpoints,
            restorer=self.restorer,
            ledger=ledger,
            observes=policy.observes,
            log=self.log,
        )
        memory_only = self.checkpoints.store.disk is None
        self.last_state = LastState(
            driver=driver,
            loaders=self.loaders,
            restorer=self.restorer,
            saves=self._saves,
            log=self.log,
            # Whether a save before an exception ends the run is of use.
            exact=not memory_only and ranks.world == 1,
        )
        self._ids: dict[int, list[BatchId]] = {}
        """Number of a loader -> ids of its batches since the last step."""
        self._last_ids: list[BatchId] = []
        """Ids of the last step's batches."""
        self._current = self._trained = 0
        """Numbers of the loaders of the last batch and of the last step."""
        self._generators: HostParts | None = None
        self._resumed_at: int | None = None
        self._used_up = False
        """The loader that steps are taken with had no further batch."""
        self._open: set[int | None] = set()
        """Numbers of the loaders whose loop has a batch in hand."""
        self._rate_checked = policy.observes
        self._update_went_back = False
        """Whether an `update` since the last `after_step` has brought a rollback."""

    # -- the start, see `lifecycle` -------------------------------------------------------------

    def set_restored(self, step: int, generators: HostParts | None) -> None:
        """Sets the step and the random state after an earlier process's checkpoint was restored."""
        self.step, self._generators = step, generators
        self._restore_generators()

    def set_start(self, step: int, *, resumed: bool) -> None:
        """Sets the step that this process starts from."""
        self.restorer.started_from = step
        self._saves.reset(step)
        self._resumed_at = step if resumed else None

    def read_engines(self) -> None:
        """Takes the engines' learning-rate multipliers and counts as known, without an event."""
        self.monitor.set_engines(self.driver.healing())

    # -- the loop -------------------------------------------------------------------------------

    def batches(self, loader: Any, epochs: int | None) -> Iterator[Any]:
        """See `Healer.batches`."""
        self.after_step()  # of a loop that was left by `break`
        if not self.loaders.has_saved(loader):
            self._restore_generators()  # it begins now, as it did after that checkpoint
            number = self.loaders.begin(loader, epochs)
        else:
            number = self.loaders.begin(loader, epochs)
            self._restore_generators()
        self._check_batch_size(number, loader)
        for line in self.loaders.notices:
            self.log.event("data", step=self.step, outcome=line)
            self.log.info(f"data: {line}")
        self.loaders.notices.clear()
        while True:
            try:
                self.guard.watch()
                batch, name = self._next(number)
            except StopIteration:
                self.guard.pause()
                if not self._back_from_the_end(number):
                    self._used_up |= number == self.loaders.current
                    break
                continue
            finally:
                self._log_skipped(number)
            self._current = number
            self._ids.setdefault(number, []).append(name)
            self._generators = None
            if self.dominance.asks and not self._loop_names_batches:
                self._contents.setdefault(number, []).append(ObservedBatch(batch))
            self.guard.watch()
            self._open.add(number)
            try:
                self.dominance.check_loss_fn(batch)
                yield batch
            except GeneratorExit:  # the loop was left by `break`
                self.guard.pause()
                raise
            finally:
                self._open.discard(number)
            self.after_step()
            if number == self.loaders.current and self._batches_since_step == _MAX_WITHOUT_STEP:
                self._warn_no_step()
        if number != self.loaders.current:  # an evaluation: its batches wait for no step
            self._ids.pop(number, None)
            self._contents.pop(number, None)
        self.loaders.close(number)

    def _check_batch_size(self, number: int, loader: Any) -> None:
        """Warns of a loader whose batches have another size than at the start of the run."""
        change = change_of_batch_size(self.journal, number, loader)
        if change:
            self.warn(
                f"{change} (saved -> given): the loader continues at the same number of batches, "
                "which is another position in the data; to start from the first batch, pass an "
                "empty directory"
            )

    def after_step(self, *, last: bool = False) -> bool:
        """See `Healer.after_step`."""
        went_back = self._between_steps(last=last) or self._update_went_back
        self._update_went_back = False
        return went_back

    def after_update(self) -> None:
        """See `Healer.update`. The state that it returns has to be that of the next step."""
        number = self.loaders.current
        went_back = self._between_steps()
        if not went_back and number in self._open and self.loaders.at_end(number):
            went_back = self._back_from_the_end(number)
        self._update_went_back |= went_back

    def _between_steps(self, *, last: bool = False) -> bool:
        self.guard.pause()
        self.polled = True
        pending = self.driver.poll_step()
        if pending is not None:
            self._push(pending)
        if last:
            return self._back_from_the_end()
        if pending is not None:
            if self._read() or self._save_when_due():
                return True
            if self.votes.due(self.step):
                self._vote()
            self.checkpoints.poll(self.ledger)
        self._log_driver_warnings()
        # Within an accumulation the state cannot be saved: the run ends after it.
        may_end = self.between_steps or self._batches_since_step >= _MAX_WITHOUT_STEP
        if self.votes.possible:  # the next step brings the vote
            if self.stop_file.found and not self._proposed_end:
                self._proposed_end = True
                self.votes.propose(Proposal(Severity.END, self.stop_file.why))
        elif may_end:
            self.termination.raise_if_alone()
            if self.stop_file.found:
                raise EndRequested(self.stop_file.why)
        return False

    def _vote(self) -> None:
        """Does what the ranks agree on; raises what ends the run on all of them."""
        outcome = self.votes.hold(self.step)
        if outcome is None:
            return
        self.ends_together = outcome.severity >= Severity.END
        if outcome.severity is Severity.STOP:
            self.stop(outcome.why)
        if outcome.severity is Severity.END:
            if outcome.signal is None:
                raise EndRequested(outcome.why)
            raise exit_for(outcome.signal)
        if outcome.severity is Severity.SAVE:
            self.save("requested")

    def _back_from_the_end(self, number: int | None = None) -> bool:
        """Whether the last steps or their weights send the run back although it would end."""
        alone, of_training = self.ranks.world == 1, number in (None, self.loaders.current)
        if not alone and not of_training:
            return False  # one rank may evaluate alone, and to read steps is collective
        if self._read(all=True):
            return True
        verdict = self.dominance.at_end(self.step) if of_training else None
        if verdict is not None:
            done = self._roll_back_to_better(verdict)
            if done.status is Status.APPLIED:
                self._continue_from(done.target)
                return True
        if alone and of_training:
            self._saves.save_if_not_finite(self.step)
        return alone and self._leave_bad_state()

    @property
    def between_steps(self) -> bool:
        """Whether state and data positions are those of `step`: no batch is waiting for a step."""
        return not self._batches_since_step

    @property
    def unused(self) -> tuple[BatchId, ...]:
        """See `Healer.unused`."""
        return tuple(self._ids.get(self._current, ()))

    @property
    def _batches_since_step(self) -> int:
        return len(self._ids.get(self._current, ()))

    def _next(self, number: int) -> tuple[Any, BatchId]:
        if not self.between_steps:
            return self.faults.next_batch(number)
        with self.termination.waiting_for_data():
            return self.faults.next_batch(number)

    def _push(self, pending: PendingDispatch) -> None:
        """Queues a dispatch, with the batches of the loader that yielded last."""
        again = self._last_ids if self._current in self._open else []  # of one batch, two updates
        self._last_ids = ids = self._ids.get(self._current, again)
        self._ids.clear()  # a step may take batches of several loaders
        self.loaders.stepped(self._current, ids[-1] if ids else None)
        if self._current != self._trained:
            self._trained, self.monitor.loader_from = self._current, self.step
        contents = tuple(self._contents.get(self._current, ()))
        self._contents.clear()
        self.reader.push(QueuedDispatch(self.step, pending, tuple(ids), contents))
        self.step += pending.count
        self.steps_taken += pending.count
        self._saves.count(pending.count)
        self.guard.stepped(self.step)
        self.last_state.after_step()

    def _read(self, *, all: bool = False) -> bool:
        """Reads the steps that are due; whether the run has gone back."""
        for step, order in self._process_due(all=all):
            self._check_rate()
            verdict = self._compared(step)
            self.recovery.observe_rerun(step.index, order)
            if order is not None:
                self.recovery.carry_out(order, self.step)
            elif verdict is not None:
                order = self._roll_back_to_better(verdict)
            else:
                continue
            if order.status is Status.APPLIED:
                self._continue_from(order.target)
                return True
            if order.action & Action.SAVE:
                self.save("ordered")
        return False

    def _roll_back_to_better(self, verdict: Verdict) -> Rollback:
        order = self.recovery.roll_back_to_better(verdict, self.step)
        if order.status is not Status.APPLIED:
            self.dominance.stay_silent(verdict.index + self.policy.region)
        return order

    def _check_rate(self) -> None:
        """Says once, after the first step, that the learning rate is unknown."""
        if self._rate_checked:
            return
        self._rate_checked = True
        if self.policy.engine.limits_lr and self.driver.learning_rate() is None:
            self.log.info(
                "the learning rate is unknown: a rollback can lower it by a factor, but not to the "
                "last healthy rate. In JAX write optax.inject_hyperparams(optax.adamw)("
                "learning_rate=...), or pass learning_rate=... to tx.update"
            )

    def _compared(self, step: StepResult) -> Verdict | None:
        """Compares the current weights with earlier ones, if there is a reason to."""
        records = step.records
        if not self.dominance.asks or not any(each.judged for each in records):
            return None
        bad = any(each.cause & Cause.NONFINITE_LOSS for each in records)
        loss = math.nan if bad else sum(each.loss for each in records) / len(records)
        return self.dominance.observe(
            TrainedStep(step.index, step.contents),
            loss,
            alarm=any(each.cause & ~LASTING for each in records),
            trained=not all(each.skip for each in records),
        )

    def _rate_in_force(self) -> float | None:
        rate = self.driver.learning_rate()
        return None if rate is None else rate * self.monitor.lr_scale

    def observed(self, batch: Any) -> None:
        """Takes a batch, or the current part of it, whose loss the loop has from `loss_fn`."""
        if self.dominance.asks:
            if not self._loop_names_batches:
                self._loop_names_batches = self.dominance.gives_loss = True
                self._contents.clear()
            part = self.out_of_memory.window.part
            weight = 1.0 if part is None else part.weight
            self._contents.setdefault(self._current, []).append(ObservedBatch(batch, weight))

    def _forget_parts(self) -> None:
        """Forgets the parts of batches since the last step, which come again in smaller parts."""
        if self._loop_names_batches:
            self._contents.clear()

    def _process_due(self, *, all: bool) -> Iterator[tuple[StepResult, Rollback | None]]:
        self.guard.watch()  # reading waits for the device
        for step in self.reader.due(all=all):
            self.guard.pause()
            # A dispatch may have more or fewer steps than `PendingDispatch.count`.
            correction = self.reader.count_correction()
            self.step += correction
            self._saves.count(correction)
            for record in step.records:
                fields = self.metrics.write(step.index, record, several=len(step.records) > 1)
                if fields is not None:
                    self.log.trackers.metrics(step.index, record, fields)
            self.votes.read(step)
            yield step, self.monitor.process(step)
            self.guard.watch()
        self.guard.pause()

    def _continue_from(self, target: int) -> None:
        """Continues after a rollback to `target`."""
        self.step = target
        self._saves.reset(target)
        self._state_check.on_rollback()
        self.reader.clear()
        self.votes.on_rollback()
        self.dominance.on_rollback(target)
        self.metrics.went_back()
        self._ids.clear()
        self._last_ids = []
        self._contents.clear()
        self.read_engines()

    # -- saving ---------------------------------------------------------------------------------

    def save(self, why: str) -> None:
        """Saves a checkpoint of this step."""
        self._saves.save(self.step, why)
        if why in ("first", "regular"):
            self.keep_anchor()

    def keep_anchor(self) -> None:
        """Keeps the current weights to compare later ones with, and the anchors' checkpoints."""
        self.dominance.keep(self.step, self.checkpoints.catalog)
        self.checkpoints.protect(each.step for each in self.dominance.anchors)

    def save_requested(self) -> None:
        """See `Healer.save`."""
        self.take_last_step()
        self.save("requested")

    def take_last_step(self) -> bool:
        """Counts a step that was finished before the loop was left; False: it was not finished."""
        if self.driver.interrupted():
            return False
        pending = self.driver.poll_step()
        if pending is not None:
            self._push(pending)
        return True

    def act_on_last_steps(self) -> None:
        """Reads the steps that were not read yet and does what they order, as `after_step` does.

        Not if an update was interrupted. Raises RunStopped if that is what they order.
        """
        if self.take_last_step():
            self._read(all=True)

    def read_last_steps(self) -> list[tuple[StepResult, Rollback | None]]:
        """Reads the steps that were not read yet; their orders are not carried out."""
        return list(self._process_due(all=True))

    def waiting_batches(self) -> dict[int, BatchId]:
        """Number of a loader -> its first batch since the last step, which waits for the next."""
        return {number: ids[0] for number, ids in self._ids.items() if ids}

    @property
    def steps_left_out(self) -> int:
        """Steps, about, whose batches are left out."""
        return self.loaders.left_out_count // max(1, len(self._last_ids))

    @property
    def left_by_break(self) -> str:
        """Where a `break` has left the loop before the end of the epochs asked for, or ""."""
        return "" if self.has_trainer else self.loaders.left_at()

    @property
    def resumed_here(self) -> bool:
        """Whether this process has resumed and not taken a step since."""
        return self.step == self._resumed_at

    def _save_when_due(self) -> bool:
        """A save, if one is due; whether the run has gone back instead."""
        regular = self._saves.due(self.step)
        if not regular and not self._saves.restart_due(self.step):
            return False
        # Unread steps may bring an order, which a restart from this save would never see. Reading
        # them takes no longer than the save, which waits for the device anyway.
        if self._read(all=True):
            return True
        if not regular:
            self._saves.save_for_restart(self.step)
        elif self._saves.alarm_free(self.step):
            if self._leave_bad_state():
                return True
            self.save("regular")
        return False

    def _leave_bad_state(self) -> bool:
        """Whether the run has gone back because saves have found NaN or Inf."""
        order = self._state_check.check(self.step)
        if order is None:
            return False
        self.recovery.carry_out(order, self.step)
        if order.status is not Status.APPLIED:
            return False
        self._continue_from(order.target)
        return True

    # -- the end, see `lifecycle` ---------------------------------------------------------------

    def read_remaining(self) -> None:
        """Reads the last steps at the end of a run; their orders are only reported."""
        pending = self.driver.poll_step()
        if pending is not None:
            self._push(pending)
        self._log_driver_warnings()
        if self._batches_since_step >= _MIN_WITHOUT_STEP:
            self._warn_no_step()
        if self.resumed_here and not self.had_completed:
            used_up = self._used_up and not self._batches_since_step
            why = "the data had been used up" if used_up else "the loop ended without one"
            self.warn(f"no step was taken: {why} at step {self.step}")
        for step, order in self.read_last_steps():
            if order is not None:
                what = ", ".join(names(Action(order.action)))
                problem = f"{what} was ordered by the last steps of the run and not carried out"
                self.log.problem(step.index, problem)

    def stop(self, why: str) -> NoReturn:
        """Ends the run with a diagnosis; see `Healer.stop`."""
        stop(self.log, run_end(self, Ending.STOPPED, why))

    # -- reports --------------------------------------------------------------------------------

    def warn(self, problem: str) -> None:
        """Reports a problem of the present step."""
        self.log.problem(self.step, problem)

    def _warn_no_step(self) -> None:
        self.warn(
            f"{self._batches_since_step} batches and no step: in JAX call healer.update(state) "
            "after each step, in torch pass the optimizer that steps in the state"
        )

    def _log_driver_warnings(self) -> None:
        self.log.report_trackers(self.step)
        while self.driver.warnings:
            self.warn(self.driver.warnings.pop(0))

    def _log_skipped(self, number: int) -> None:
        skipped = self.loaders.skipped(number)
        if skipped:
            self.log.event(
                "skipped_batches", step=self.step, batches=[list(each) for each in skipped]
            )
            batches = counted(len(skipped), "batch", "batches")
            self.log.info(f"step {self.step}: {batches} skipped")

    # -- within ---------------------------------------------------------------------------------

    def _restore_generators(self) -> None:
        """Restores random generators from the checkpoint; rewinding a loader draws from them.

        Called after a restart, and again with each loader until the first batch.
        """
        if self._generators is not None:
            self.restorer.host.put_back(self._generators)
