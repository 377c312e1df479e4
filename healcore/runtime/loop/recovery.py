"""`Recovery`: answers the records of steps with rollbacks and stops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from healcore.console import counted
from healcore.core.verdict import Action, Cause, names
from healcore.events.models import Ending
from healcore.events.schema import sentence
from healcore.runtime.checkpoints.manager import CheckpointManager
from healcore.runtime.data import BatchId
from healcore.runtime.data.loader_registry import RewindResult
from healcore.runtime.dominance.anchor import TrainedStep
from healcore.runtime.dominance.dominance import Dominance
from healcore.runtime.dominance.verdict import Verdict
from healcore.runtime.driver import Driver
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.delayed_reader import DelayedReader, StepResult
from healcore.runtime.incidents.hooks import Hooks, RunFacts
from healcore.runtime.incidents.ledger import LASTING, Ledger
from healcore.runtime.incidents.rollback import Order, Rollback
from healcore.runtime.incidents.step_lines import (
    FROM_START,
    IN_A_ROW,
    cause_text,
    nonfinite_row_text,
)
from healcore.runtime.loop.data import Data
from healcore.runtime.loop.termination import RunStopped
from healcore.runtime.postmortem.diagnosis import RunEnd, explain
from healcore.runtime.recovery.engine_states import lr_states, with_lr_states
from healcore.runtime.recovery.evidence import Evidence
from healcore.runtime.recovery.host_rules import HostRules
from healcore.runtime.recovery.monitor import IncidentMonitor
from healcore.runtime.recovery.restoring import Restorer
from healcore.runtime.recovery.trials import MAX_ACCEPTED, Facts, Trial, decide
from healcore.runtime.run_log import RunLog
from healcore.runtime.store import Saved, StateMismatch, StoreError
from healcore.runtime.store.errors import NoGoodCheckpoint
from healcore.runtime.store.ranks import Ranks, agreed


class Recovery:
    """Reads the steps, and carries out the orders of the monitor and of comparisons of weights."""

    def __init__(
        self,
        *,
        policy: HostPolicy,
        driver: Driver,
        data: Data,
        ranks: Ranks,
        log: RunLog,
        ledger: Ledger,
        hooks: Hooks,
        restorer: Restorer,
        loss_fn: Callable[..., Any] | None,
    ) -> None:
        self._policy = policy
        self._driver = driver
        self._data = data
        self._ranks = ranks
        self._log = log
        self.restorer = restorer
        self.ledger = ledger
        self.reader = DelayedReader()
        every = self._checkpoints.every
        self.monitor = IncidentMonitor(
            policy=policy,
            ledger=ledger,
            hooks=hooks,
            ranks=ranks,
            log=log,
            facts=self._facts,
            learning_rate=driver.learning_rate,
            interval=every,
        )
        config = policy.engine.config
        self._host_rules = HostRules(
            policy.rules, depth=config.rollback.depth, quiet_steps=config.incident.quiet_steps
        )
        self.dominance = Dominance(
            driver=driver,
            loss_fn=loss_fn,
            ranks=ranks,
            threshold=policy.evidence,
            interval=every,
            warn=lambda problem: log.problem(data.step, problem),
            log=log,
            learning_rate=self._rate_in_force,
            numbers=self._numbers_in_force,
        )
        restorer.dominance = self.dominance
        driver.hold_numbers(lambda: ledger.numbers)
        self._evidence = Evidence(policy, driver, ranks, ledger, log, self.dominance)

    @property
    def rollbacks(self) -> int:
        """Number of rollbacks so far, including earlier processes."""
        return len(self.ledger.rollbacks)

    @property
    def _checkpoints(self) -> CheckpointManager:
        return self.restorer.checkpoints

    # -- reading --------------------------------------------------------------------------------

    def process(self, step: StepResult) -> Order | None:
        """Processes a step that was read. Returns its order, or None."""
        # A dispatch may have more or fewer steps than `PendingDispatch.count`.
        self._data.step += self.reader.count_correction()
        step = step._replace(records=[self._host_rules.ordered(each) for each in step.records])
        self._log.records(step.index, step.records)
        return self.monitor.process(step)

    def act(self, step: StepResult, order: Order | None) -> Rollback | None:
        """Carries out the order of a step, or else an order for better earlier weights.

        Returns the rollback, or None. Raises RunStopped if the order stops the run.
        """
        self.stop_if_never_finite(order)
        verdict = self._compare_weights(step)
        if order is not None:
            return self.carry_out(order)
        return None if verdict is None else self.roll_back_to_better(verdict)

    def stop_if_never_finite(self, order: Order | None = None, *, at_end: bool = False) -> None:
        """Ends a run that trains nothing: no finite step since the start, or for many steps.

        With an order to roll back or to stop, ends a run that began with weights with NaN or Inf.
        """
        row, from_start = self.monitor.nonfinite_row, self.monitor.never_finite
        due = row >= (FROM_START if from_start else IN_A_ROW) or (at_end and from_start and row > 0)
        ordered = order is not None and order.action & (Action.ROLLBACK | Action.STOP)
        if self._policy.observes or not (due or (from_start and ordered)):
            return
        weights, record = self._driver.nonfinite_weights(), self.monitor.nonfinite_record
        if record is not None and (due or weights):
            self.stop(nonfinite_row_text(record, row, weights, from_start))

    def _compare_weights(self, step: StepResult) -> Verdict | None:
        """Compares the current weights with earlier ones, if there is a reason to."""
        records = step.records
        if not self.dominance.is_enabled:
            return None
        taken = records[0].taken
        if taken and not any(each.judged for each in records):
            return None
        repeated = step.index < self._last_trial()
        if self.ledger.numbers and not repeated:  # a hold ends with the unusual value
            held, now = self.ledger.numbers, self._driver.numbers()
            self.ledger.numbers = {
                n: each for n, each in held.items() if n in now and not each.contains(now[n])
            }
        bad = not taken or any(each.cause & Cause.NONFINITE_LOSS for each in records)
        loss = math.nan if bad else sum(each.loss for each in records) / len(records)
        return self.dominance.observe(
            TrainedStep(step.index, step.contents),
            loss,
            alarm=not taken or any(each.cause & ~LASTING for each in records),
            trained=taken and not all(each.skip for each in records),
            norm=max((each.grad_norm for each in records if each.judged), default=math.nan),
            repeated=repeated,
        )

    def _numbers_in_force(self) -> dict[str, float]:
        numbers, held = self._driver.numbers(), self.ledger.numbers
        return {n: held[n].held(each) if n in held else each for n, each in numbers.items()}

    def _rate_in_force(self) -> float | None:
        rate = self._driver.learning_rate()
        return None if rate is None else rate * self.monitor.lr_scale

    # -- orders ---------------------------------------------------------------------------------

    def carry_out(self, order: Order) -> Rollback | None:
        """Carries out an order. Returns the rollback, or None without one.

        Weights that are not finite do not recover: a verdict that waits for that is due. Raises
        RunStopped if the run has to stop.
        """
        evidence, damaged = self._evidence, self._is_damaged(order)
        first = self.monitor.last_trained
        # NaN in an accumulator comes from the batches of the bad update itself.
        if damaged and 0 <= first < order.since and not self.monitor.has_micro_steps:
            # Skipped steps change no weights, so the last step before them has done the damage.
            batches = tuple(self.monitor.batches_between(first, order.index))
            order = replace(order, onset=min(order.onset, first), exact=True, batches=batches)
        if evidence.needed(order) and not evidence.found(order, damaged=damaged):
            return None
        if order.action & Action.STOP:
            self.stop(self._stop_reason(order))
        if not order.action & Action.ROLLBACK:
            return None
        verdict = self.dominance.pending(order.index) if damaged else None
        better = None if verdict is None else self.roll_back_to_better(verdict, finite=False)
        if better is not None:
            return better
        exhausted = evidence.exhausted(order)
        if not exhausted:
            return self.roll_back(self._with_measures(order))
        if not evidence.needed(order) or not evidence.finite():
            self.stop(exhausted)
        evidence.decline(order, "budget", "the budget of rollbacks is exhausted")
        return None

    def _is_damaged(self, order: Order) -> bool:
        """Whether the state has disallowed NaN or Inf at an order of the engine. Collective."""
        if order.arrays or not order.action & (Action.ROLLBACK | Action.STOP):
            return False
        if not self._evidence.finite():
            return True
        if self._policy.nonfinite_state != "rollback":
            return False
        if self.monitor.has_micro_steps:
            return False
        return bool(self.restorer.checkpoints.nonfinite_in(self.restorer.items()))

    def roll_back_to_better(self, verdict: Verdict, *, finite: bool = True) -> Rollback | None:
        """Tries, verifies and undoes, see `recovery.trials`; the better weights are of `dominance`.

        After several places that were accepted one after another, only alerts. Weights that are not
        `finite` cannot be accepted: then nothing is done.
        """
        self._log.event(
            "assessment",
            step=verdict.index,
            onset=verdict.onset,
            cause=[],
            verdict="damage",
            by="earlier_weights",
            rise=verdict.rise,
            rise_remembered=verdict.rise_remembered,
        )
        past = [each for each in self.ledger.same_trouble(verdict.onset) if each.trial]
        order = self._order_of(verdict, past)
        if order.trial == Trial.ACCEPT:
            return self._accept(order, verdict, past) if finite else None
        done = self.roll_back(order)
        if done is None and finite:
            self.dominance.accept(verdict.index + 1)
        return done

    def _order_of(self, verdict: Verdict, past: Sequence[Rollback]) -> Order:
        """The order for a verdict; `past` are the trials at this place that have not helped."""
        order = Order(
            # At the end of the data, the verdict has the number of steps done.
            index=min(verdict.index, self._data.step - 1),
            onset=verdict.onset,
            since=verdict.onset,
            forced=True,
            better=verdict.anchor,
            trial=Trial.ACCEPT,
        )
        tried = [Trial(each.trial) for each in past]
        if not tried and self._last_trial() > self.ledger.accepted_until:
            self.ledger.accepted = 0  # the trials at the last place have helped
        if not tried and self.ledger.accepted >= MAX_ACCEPTED:
            return order
        unusual = agreed(self._ranks, self.dominance.unusual(verdict)) if tried else []
        numbers = agreed(self._ranks, self.dominance.unusual_numbers(verdict))
        facts = Facts(
            rates=verdict.rates,
            healthy_rate=verdict.healthy_rate,
            from_start=verdict.anchor <= self.restorer.record.first_step,
            unusual=bool(unusual),
            numbers=bool(numbers),
            may_limit=self._policy.engine.config.budget.lr_cuts if self._may_limit_lr else 0,
            can_rewind=self.restorer.loaders.can_rewind,
        )
        trial = agreed(self._ranks, decide(tried, facts))  # each reads its own optimizer
        if trial == Trial.RATE:
            rates = verdict.rates
            rate = next(iter(rates), math.nan) if facts.from_start else max(rates, default=math.nan)
            rate = agreed(self._ranks, rate)
            states = lr_states(self._driver.healing())
            return replace(order, trial=trial, lr_at_fault=rate, lr_states=states)
        if trial == Trial.LEAVE_OUT:
            return replace(order, trial=trial, batches=tuple(self.monitor.batches_of(unusual)))
        if trial == Trial.NUMBERS:
            return replace(order, trial=trial, numbers=numbers, read_again=_batches_of(past))
        return replace(order, trial=trial)

    def _last_trial(self) -> int:
        """The step at which the last trial began, or 0."""
        return max((each.step for each in self.ledger.rollbacks if each.trial), default=0)

    def _accept(self, order: Order, verdict: Verdict, past: Sequence[Rollback]) -> Rollback | None:
        """Undoes what was tried, and never rolls back for this trouble again."""
        until = self._data.step + 1
        self.ledger.accepted, self.ledger.accepted_until = self.ledger.accepted + 1, until
        rates = [each for each in past if each.trial == Trial.RATE]
        order = replace(
            order,
            better=min([verdict.anchor, *(each.target for each in past)]),
            lr_states=rates[0].lr_states if rates else {},
            read_again=_batches_of(past),
            numbers=dict.fromkeys(name for each in past for name in each.numbers),
        )
        undone = bool(rates or order.read_again or order.numbers)
        done = self.roll_back(order) if undone else None
        if done is None:
            states = with_lr_states(self._driver.healing(), order.lr_states)
            self._driver.load_healing(states)
            for name in order.numbers:
                self.ledger.numbers.pop(name, None)
        self.dominance.accept(until)
        tries = (
            f"after {counted(len(past), 'rollback')}, so the program means it"
            if past
            else (f"and {MAX_ACCEPTED} places before it came back after all that was tried")
        )
        changes = "what was tried is undone, and " if undone else ""
        self._log.warning(
            f"step {order.index}: the weights of step {verdict.anchor} are better on the same "
            f"batches, since step {verdict.onset}, {tries}: {changes}the run goes on without "
            "another rollback for it"
        )
        return done

    def _with_measures(self, order: Order) -> Order:
        """An order of the policy with its depth and learning-rate limit.

        The rate is limited if an earlier rollback for the same trouble has not helped.
        """
        past = self.ledger.same_trouble(order.onset, self._policy.region)
        if not order.forced:
            rollback = self._policy.engine.config.rollback
            order = replace(order, depth=rollback.depth + rollback.deepen * len(past))
        return replace(order, lr_at_fault=math.nan) if self._may_limit_lr and past else order

    @property
    def _may_limit_lr(self) -> bool:
        """Whether rollbacks limit the learning rate. Otherwise only rules of the policy cut it."""
        return self._policy.confirm and self._policy.engine.limits_lr

    def roll_back(self, order: Order) -> Rollback | None:
        """Restores a checkpoint for an order, and reports the rollback.

        Returns None if no checkpoint is usable for better earlier weights; then the run continues.
        """
        # Unread steps belong to the trouble up to their last alarm.
        unread = list(self.reader.due(all=True))
        self.ledger.skips += sum(any(each.skip for each in late.records) for late in unread)
        if order.better is None:
            late = self.monitor.batches_of_alarms(unread)
            order = replace(order, batches=(*order.batches, *late))
        step = self._data.step
        try:
            done, moved = self.restorer.roll_back(order, step)
        except StoreError as error:
            expected = isinstance(error, NoGoodCheckpoint | StateMismatch)
            if order.better is None or not expected:
                self.stop(str(error))
            problem = f"the weights of step {order.better} are better, but {error}"
            self._log.problem(step, f"{problem}; the run continues without a rollback")
            return None
        self.monitor.on_rollback(done.target)
        self.report(done, moved)
        return done

    def on_rollback(self, target: int) -> None:
        """Forgets the steps from `target` on."""
        self.reader.clear()
        self._host_rules.restart()
        self.read_engines()

    def read_engines(self) -> None:
        """Sets the monitor's learning-rate multipliers and counts from the engines' states."""
        self.monitor.sync_engines(self._driver.healing())

    def _stop_reason(self, order: Order) -> str:
        if order.arrays:
            return nonfinite_save(order)
        if order.forced:
            return "an on_incident hook stopped it"
        engines = self._driver.healing().values()
        if any(engine["state"]["budget"]["recoveries"] == 0 for engine in engines):
            return "the budget of recoveries is exhausted, and the trouble continues"
        return "a rule of the policy stops it"

    # -- reports --------------------------------------------------------------------------------

    def report(self, done: Rollback, moved: RewindResult) -> None:
        """Writes the events and the console line of a rollback."""
        rollback = self._log.event(
            "rollback",
            step=done.step,
            number=done.number,
            onset=done.onset,
            cause=names(Cause(done.cause)),
            checkpoint=done.target,
            by=None if done.better is None else "earlier_weights",
            outcome="done",
            lr=done.lr,
            lr_limit=done.lr_limit,
            lr_at_fault=None if done.lr is None else done.lr_at_fault,
            lr_scale_before=self.monitor.lr_scale_before,
            lr_scale=done.lr_scale,
            batches=[list(each) for each in done.batches],
            repeated=done.repeated,
            initial=done.initial,
            why=done.numbers_text or None,
            moments_reset=True if self._policy.reset_moments else None,
        )
        data = "rewound" if moved.rewound else f"continues forward: {moved.why_not}"
        self._log.event("data", step=done.target, outcome=data, rewound=moved.rewound)
        cause = cause_text(Cause(done.cause)) or "ordered by a hook"
        if done.arrays:
            cause = nonfinite_save(done)
        if done.better is not None:
            cause = f"the weights of step {done.better} are better on the same batches"
        self._log.warning(
            f"step {done.index}: {cause}, since step {done.since}; {sentence(rollback)}, "
            f"data {data.split(':')[0]}"
        )

    def stop(
        self,
        why: str,
        error: BaseException | None = None,
        fault: Cause = Cause(0),  # noqa: B008 -- immutable
        **fields: Any,
    ) -> NoReturn:
        """Ends the run with a diagnosis.

        Args:
            why: the reason.
            error: exception of the loop, if this is the reason.
            fault: the cause of `error`.
            fields: further fields of the event.
        """
        end = self.run_end(Ending.STOPPED, why, fault=fault)
        text = explain(end)
        self._log.event(
            "stop", step=end.step, why=why, diagnosis=text, checkpoint=end.last_good, **fields
        )
        raise RunStopped(text, why, end.last_good) from error

    def run_end(self, ending: Ending, why: str = "", **fields: Any) -> RunEnd:
        """How the run ends. `why` is the reason of a stop, or the signal."""
        good, path = self._last_good_checkpoint()
        is_regular = self._checkpoints.store.accepts("regular")  # else none becomes known-good
        return RunEnd(
            self._log.run,
            ending,
            self._data.step,
            self.monitor.counts()._replace(rollbacks=self.rollbacks),
            why,
            open=self.monitor.is_unhealthy,
            lr_scale=self.monitor.lr_scale,
            last_good=good,
            last_good_path=path,
            probation=self._policy.probation if is_regular else None,
            not_finite=tuple(self._checkpoints.nonfinite),
            metrics=self.monitor.metrics.values(),
            **fields,
        )

    def _last_good_checkpoint(self) -> tuple[int | None, str | None]:
        """Step and path of the newest known-good checkpoint."""
        step = self._checkpoints.good
        return step, next((each.path for each in self.listed() if each.step == step), None)

    def listed(self) -> list[Saved]:
        """The checkpoints, or none if the store cannot be read."""
        try:
            return self._checkpoints.listed()
        except StoreError:
            return []

    def _facts(self) -> RunFacts:
        """The facts for a hook."""
        return RunFacts(
            run=self._log.events.run,
            policy=self._policy.name,
            observes=self._policy.observes,
            framework=self._driver.framework,
            rank=self._ranks.rank,
            learning_rate=self._driver.learning_rate(),
            rollbacks=self.rollbacks,
            last_good=self._last_good_checkpoint()[0],
            checkpoints=tuple(self.listed()),
        )


def nonfinite_save(order: Order) -> str:
    """Arrays with NaN or Inf in a save, as a clause."""
    return f"a save has found NaN or Inf in {', '.join(order.arrays[:3])}"


def _batches_of(past: Sequence[Rollback]) -> tuple[BatchId, ...]:
    """The batches that trials have left out."""
    return tuple(batch for each in past for batch in each.batches)
