"""`Recovery`: answers the records of steps with rollbacks and stops."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from healcore.console import counted, first_of, passes_power_of_ten
from healcore.core.decision import NONFINITE, Action, Cause, names
from healcore.events.models import Ending
from healcore.events.schema import flag_names, lr_text, sentence
from healcore.runtime.data.loader_registry import EPOCH_LOST
from healcore.runtime.run.better_weights import INTENDED
from healcore.runtime.run.dead_run import (
    STEPS_TO_REVIVE,
    Attempt,
    TrainedRates,
    attempts_at,
    next_attempt,
)
from healcore.runtime.run.evidence import TrainedStep
from healcore.runtime.run.orders import Order, RollbackRecord
from healcore.runtime.run.rollback_rates import lr_states
from healcore.runtime.run.steps import HostRules, StepResult
from healcore.runtime.run.termination import RunStopped
from healcore.runtime.store.checkpoints import (
    CheckpointInfo,
    NoGoodCheckpoint,
    StateMismatch,
    StoreError,
)
from healcore.runtime.store.ranks import broadcast
from healcore.runtime.story import diagnosis
from healcore.runtime.story.diagnosis import FROM_START, IN_A_ROW, RunEnd

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

_SERIOUS = Action.ROLLBACK | Action.STOP
_NONFINITE_ACTIONS = {"alert": Action.ALERT, "rollback": Action.ROLLBACK, "stop": Action.STOP}

STEPS_TO_CHECK = 10
"""Steps in a row without a finite one after which the weights are checked, as in `default`."""


class Recovery:
    """Reads the steps, and carries out the orders of the monitor and of comparisons of weights."""

    def __init__(self, run: Run) -> None:
        self.run = run
        policy, state = run.policy, run.monitor.state
        self._host_rules = HostRules(policy.rules, policy.engine.config, state)
        self.counts_steps = False
        """Whether the loop asks for the number of each step, so that a rollback repeats steps also
        where healcore reads no data for the loop."""
        self.ends_by_steps = False
        """Whether a trainer takes a given number of steps, from as many batches as they need."""
        self._trained_rates = TrainedRates(state)
        self._answered_nonfinite = 0
        """Number of saves with NaN or Inf in this attempt that have led to an order."""
        self._declined: Counter[str] = Counter()
        """Reason -> declined orders, to log lasting trouble only now and then."""

    def process(self, step: StepResult) -> Order | None:
        """Processes a step that was read. Returns its order, or None."""
        # A dispatch may have more or fewer steps than `PendingDispatch.count`.
        self.run.data.step += self.run.reader.take_count_correction()
        records = [self._host_rules.with_rollback_order(each) for each in step.records]
        step = step._replace(records=self.run.monitor.metrics.with_loss_ratios(records))
        self.run.log.records(step.index, step.records, steps_at_once=step.steps_at_once)
        self._trained_rates.add(step.records)
        order = self.run.monitor.process(step)
        if self.run.monitor.state.nonfinite_streak == 1:
            self._trained_rates.add_rates(self.run.monitor.rates_in_force())
        return order

    def act(self, step: StepResult, order: Order | None) -> RollbackRecord | None:
        """Carries out the order of a step, or else an order for better earlier weights.

        Returns the rollback, or None. Raises RunStopped if the order stops the run.
        """
        if order is None:
            order = self._order_for_damage(step)
        revived = self.revive(step)
        if revived is not None:
            return revived
        self.stop_if_never_finite(order)
        verdict = self.run.better_weights.compare(step)
        if order is not None:
            return self.carry_out(order)
        if verdict is not None:
            return self.run.better_weights.carry_out(verdict)
        return self.run.better_weights.accept_intended(step.index)

    def _order_for_damage(self, step: StepResult) -> Order | None:
        """The order for weights with NaN or Inf under a policy without a rule for them. Collective.

        Such weights make every step not finite. A policy that only skips these steps would skip on
        until the next save shows the damage.
        """
        policy, streak = self.run.policy, self.run.monitor.state.nonfinite_streak
        action = _NONFINITE_ACTIONS[policy.rollback.nonfinite_state]
        if streak != STEPS_TO_CHECK or policy.observes or not action & _SERIOUS:
            return None
        rules = (*policy.engine.config.rules, *policy.rules)
        if any(rule.action & _SERIOUS and rule.causes & NONFINITE for rule in rules):
            return None  # the policy decides itself
        if self.weights_are_finite():
            return None
        since = step.index - streak + 1
        return Order(
            index=step.index,
            onset=self.run.ledger.first_consecutive(step.index),
            since=since,
            action=int(action),
            cause=int(step.records[0].cause),
            batches=tuple(self.run.monitor.state.batches_between(since, step.index)),
            by_host=True,
        )

    def stop_if_never_finite(self, order: Order | None = None, *, at_end: bool = False) -> None:
        """Ends a run that trains nothing: no finite step since the start, or for many steps.

        With an order to roll back or to stop, ends a run that began with weights with NaN or Inf.
        """
        streak, from_start = (
            self.run.monitor.state.nonfinite_streak,
            self.run.monitor.state.never_finite,
        )
        longest = FROM_START if from_start else IN_A_ROW
        due = streak >= longest or (at_end and from_start and streak > 0)
        ordered = order is not None and order.action & _SERIOUS
        if self.run.policy.observes or not (due or (from_start and ordered)):
            return
        weights, record = self.run.driver.nonfinite_weights(), self.run.monitor.nonfinite_record
        if record is not None and (due or weights):
            self.stop(diagnosis.nonfinite_streak_text(record, streak, weights, from_start))

    def revive(self, step: StepResult) -> RollbackRecord | None:
        """Rolls back a run in which no step is finite any more although the weights are finite.

        See `dead_run` for when and how. Returns the rollback, or None without one. Collective.
        """
        streak, record = (
            self.run.monitor.state.nonfinite_streak,
            self.run.monitor.nonfinite_record,
        )
        if streak not in (STEPS_TO_REVIVE, IN_A_ROW):
            return None
        policy, ledger = self.run.policy, self.run.ledger
        decides = policy.rolls_back and policy.rollback.confirm  # else only the policy's own rules
        # A run without any finite step has nothing to go back to.
        if not decides or self.run.monitor.state.never_finite or record is None:
            return None
        if not self.weights_are_finite():
            return None
        onset = max(ledger.first_consecutive(step.index) - 1, 0)
        is_sound = self._earlier_weights_are_sound(step, onset)
        if is_sound is False:
            return None  # the data
        # What the comparisons have found is surer, and a run without finite steps cannot recover.
        suspicion = self.run.comparisons.suspicion(step.index)
        better = suspicion and self.run.better_weights.carry_out(suspicion)
        if better is not None:
            return better
        loaders = self.run.loaders
        repeats = loaders.can_rewind or (loaders.last_trained is None and self.counts_steps)
        attempt = next_attempt(
            streak, ledger.rollbacks, onset, repeats=repeats, sure=is_sound is True
        )
        if attempt is None:
            return None
        return self.roll_back(self._order_to_revive(step, onset, attempt))

    def _earlier_weights_are_sound(self, step: StepResult, onset: int) -> bool | None:
        """Whether weights from before `onset` have a finite loss on the batch of a step.

        If not, the batch is bad and not the weights. None if it is not known, as without `loss_fn`.
        Collective.
        """
        earlier = [each for each in self.run.comparisons.anchors if each.step <= onset]
        if not self.run.comparisons.is_enabled or not earlier or not step.contents:
            return None
        batch = TrainedStep(step.index, step.contents)
        losses = self.run.comparisons.loss_function.losses([batch], earlier[-1].weights, [math.nan])
        return None if losses is None else math.isfinite(losses[1][0])

    def _order_to_revive(self, step: StepResult, onset: int, attempt: Attempt) -> Order:
        """The order to bring back a dead run that was last trained at step `onset`."""
        streak = self.run.monitor.state.nonfinite_streak
        order = Order(
            index=step.index,
            onset=onset,
            since=step.index - streak + 1,
            cause=int(step.records[0].cause),
            by_host=True,
            # The next attempt, and one with nothing to lose, does not trust young checkpoints.
            sound_until_onset=attempt == Attempt.REPEAT and streak == STEPS_TO_REVIVE,
            attempt=attempt,
        )
        if attempt == Attempt.LIMIT_RATE and self.run.policy.may_limit_lr:
            rates = broadcast(self.run.ranks, dict(self.run.monitor.state.rates))
            return replace(order, lr_at_fault=rates, lr_states=lr_states(self.run.driver.engines()))
        if attempt == Attempt.UNDO:
            limited = attempts_at(onset, self.run.ledger.rollbacks)[-1]
            return replace(order, lr_states=limited.lr_states)
        return order

    def carry_out(self, order: Order) -> RollbackRecord | None:
        """Carries out an order. Returns the rollback, or None without one.

        Under `[rollback] confirm` an order of the policy needs evidence that the model is worse:
        weights or state with NaN or Inf. All other evidence comes from the comparisons. Weights
        that are not finite do not recover, so a verdict that waits for a recovery is carried out
        now. Raises RunStopped if the run has to stop.
        """
        damaged, needs_evidence = self._is_damaged(order), self._needs_evidence(order)
        first = self.run.monitor.state.last_trained
        # NaN in an accumulator comes from the batches of the bad update itself.
        if damaged and 0 <= first < order.since and not self.run.monitor.state.has_micro_steps:
            # Skipped steps change no weights, so the last step before them has done the damage.
            batches = tuple(self.run.monitor.state.batches_between(first, order.index))
            onset = min(order.onset, first)
            order = replace(order, onset=onset, sound_until_onset=True, batches=batches)
        if needs_evidence and damaged:
            by = "state" if self.weights_are_finite() else "weights"
            cause = Cause(order.cause)
            self.run.log.assessment(order.index, order.onset, "damage", by, cause=cause)
        elif needs_evidence:
            why = "healcore cannot tell without loss_fn whether the model is worse"
            if self.run.comparisons.is_enabled:
                why = "no comparison shows that the weights are worse"
            elif order.cause & NONFINITE:
                why = "the weights are finite"
            return self._decline(order, "nothing", why)
        if order.action & Action.STOP:
            self.stop(self._stop_reason(order))
        if not order.action & Action.ROLLBACK:
            return None
        verdict = self.run.comparisons.pending_verdict(order.index) if damaged else None
        better = verdict and self.run.better_weights.carry_out(verdict, finite=False)
        if better is not None:
            return better
        # The engine's budget does not limit the rollbacks for one trouble: healthy repeated steps
        # refund it, and rollbacks by a hook do not use it.
        reach = max(self.run.policy.budget.refund_after, 1)
        ledger = self.run.ledger
        count = len(ledger.same_trouble(order.onset, reach))
        if order.onset <= self.run.record.first_step + reach:
            count += ledger.spent  # by a run in another framework, whose engine was ported
        budget = max(self.run.policy.budget.recoveries, 1)
        if count < budget:
            order = replace(self._with_depth_and_limit(order), is_last=count + 1 == budget)
            return self.roll_back(order)
        if not needs_evidence or not self.weights_are_finite():
            rollbacks = counted(count, "rollback has", "rollbacks have")
            self.stop(f"{rollbacks} been made within {counted(reach, 'step')} of the run")
        return self._decline(order, "budget", "the budget of rollbacks is exhausted")

    def _needs_evidence(self, order: Order) -> bool:
        """Whether an order needs evidence. A `forced` order and a rule that stops need none."""
        if not self.run.policy.rollback.confirm or order.by_host or not order.action & _SERIOUS:
            return False
        rules = self.run.policy.engine.config.rules
        return not any(rule.action & Action.STOP and rule.causes & order.cause for rule in rules)

    def weights_are_finite(self) -> bool:
        """Whether the weights are finite on every rank. Collective."""
        return all(self.run.ranks.gather(self.run.driver.has_finite_weights()))

    def _is_damaged(self, order: Order) -> bool:
        """Whether the state has disallowed NaN or Inf at an order of the engine. Collective."""
        if order.arrays or not order.action & _SERIOUS:
            return False
        if not self.weights_are_finite():
            return True
        judges = self.run.policy.rollback.nonfinite_state == "rollback"
        return (
            judges
            and not self.run.monitor.state.has_micro_steps
            and bool(self.run.saver.nonfinite_in_state())
        )

    def _decline(self, order: Order, by: str, why: str) -> None:
        """Declines an order, and logs that the run continues without it."""
        cause = Cause(order.cause)
        self.run.log.assessment(order.index, order.onset, "unknown", by, cause=cause)
        self._declined[why] += 1
        times = self._declined[why]
        if passes_power_of_ten(times - 1, times):
            again = f" ({times} times so far)" if times > 1 else ""
            line = f"no rollback for {flag_names(names(cause))}, because {why}{again}"
            self.run.log.info(f"step {order.index}: {line}")

    def _with_depth_and_limit(self, order: Order) -> Order:
        """An order of the policy with its depth and learning-rate limit.

        The rate is limited if an earlier rollback for the same trouble has not helped.
        """
        past = self.run.ledger.same_trouble(order.onset, self.run.policy.rollback.region)
        if not order.by_host:
            rollback = self.run.policy.engine.config.rollback
            order = replace(order, depth=rollback.depth + rollback.deepen * len(past))
        limits = self.run.policy.may_limit_lr and past
        return replace(order, lr_at_fault={}) if limits else order

    def _stop_reason(self, order: Order) -> str:
        if order.arrays:
            return nonfinite_save(order)
        if order.by_host:
            return "an on_incident hook stopped it"
        engines = self.run.driver.engines().values()
        if any(engine["state"]["budget"]["recoveries"] == 0 for engine in engines):
            return "the budget of recoveries is exhausted, and the trouble continues"
        return "a rule of the policy stops it"

    def roll_back_if_nonfinite(self, *, at_end: bool = False) -> RollbackRecord | None:
        """Rolls back if the saves so far have new NaN or Inf. Collective.

        Moments, or statistics that the forward pass writes, may be damaged while loss and gradients
        look healthy. The check runs before the next save, whether or not the disk is slow, so that
        the result depends on the steps only. With `at_end`, the data have ended: non-finite weights
        are saved first for this check.
        """
        policy, step, ledger = self.run.policy, self.run.data.step, self.run.ledger
        if at_end:
            self.run.saver.save_if_not_finite()
        nonfinite = self.run.known.read_nonfinite()
        new = len(nonfinite) - self._answered_nonfinite
        self._answered_nonfinite = len(nonfinite)
        if not new or (policy.observes and len(nonfinite) > new):
            return None  # an observing policy reports the first bad save only
        first = min(nonfinite)
        action = _NONFINITE_ACTIONS[policy.rollback.nonfinite_state]
        since = max((each for each in self.run.known.restorable if each < first), default=0)
        bad = ledger.unhealthy_between(since, first) or list(range(since, first))
        last_trained = self.run.monitor.state.last_trained
        if since <= last_trained < bad[0]:
            bad.insert(0, last_trained)  # no step has been trained after the damage
        order = Order(
            index=step - 1,
            onset=max(first - 1, 0),  # the state after that step is bad
            since=since,
            action=int(action),
            batches=tuple(self.run.monitor.state.batches_of(bad)),
            by_host=True,
            sound_until_onset=True,  # an earlier save has found no NaN or Inf
            arrays=tuple(nonfinite[first]),
        )
        past = ledger.same_trouble(order.onset, policy.rollback.region)
        again = any({*order.arrays} <= {*each.arrays} for each in past)
        harmless = bool(action & _SERIOUS) and again and not ledger.unhealthy_between(since, step)
        if harmless and self.weights_are_finite():
            self.run.log.problem(
                step,
                f"{first_of(order.arrays)} became NaN or Inf again after a rollback, "
                "without any alarm and with finite weights: the run continues. If this is "
                "expected, name them in nonfinite_ok; otherwise no checkpoint becomes known-good",
            )
            return None
        why = f"checkpoint {first} has NaN or Inf in {first_of(order.arrays, 10)}"
        observed = policy.observes
        self.run.log.event(
            "order", step=order.index, cause=[], action=action, why=why, observed=observed
        )
        return self.carry_out(order) if action & _SERIOUS and not policy.observes else None

    def roll_back(self, order: Order) -> RollbackRecord | None:
        """Restores a checkpoint for an order, reports the rollback, and forgets the undone steps.

        Returns None if no checkpoint is usable for better earlier weights; then the run continues.
        """
        # Unread steps belong to the trouble up to their last alarm.
        unread = list(self.run.reader.read_due(all=True))
        self.run.data.step += self.run.reader.take_count_correction()
        skips = sum(any(each.skip for each in late.records) for late in unread)
        self.run.ledger.skips += skips
        if order.better_step is None and not order.attempt:
            late = self.run.monitor.batches_of_alarms(unread)
            order = replace(order, batches=(*order.batches, *late))
        order = replace(order, lr_scale_before=self.run.monitor.lr_scale)
        try:
            done = self.run.restorer.restore(order, self._lost_steps)
        except StoreError as error:
            is_optional = order.better_step is not None or order.attempt
            may_continue = isinstance(error, StateMismatch)
            may_continue |= bool(is_optional) and isinstance(error, NoGoodCheckpoint)
            if not may_continue:
                self.stop(str(error))
            self._report_impossible(order, error)
            self.run.ledger.skips -= skips
            for late in unread:
                self.process(late)
            return None
        self.report(done)
        self.run.data.on_rollback(done.target)
        self.run.reader.forget_accumulation()
        self._answered_nonfinite = 0
        self.run.monitor.read_engines()
        return done

    def _report_impossible(self, order: Order, error: StoreError) -> None:
        """Logs that no checkpoint can be restored for an order, and that the run continues.

        Where every step orders a rollback, only the 1st, 10th, 100th, ... has a line.
        """
        why = reason_of(order)
        self._declined[why] += 1
        times = self._declined[why]
        if passes_power_of_ten(times - 1, times):
            reason = str(error)
            if isinstance(error, StateMismatch):  # its advice is for a start
                reason = f"the checkpoint of step {error.step} does not fit: "
                reason += first_of(error.differences, separator="; ")
            problem = f"{why}, but {reason}; the run continues without a rollback"
            self.run.log.problem(self.run.data.step, problem)

    def _lost_steps(self, target: int, why_not: str) -> int:
        """Steps since `target` that the loop does not repeat, where the data was not rewound.

        A loop that counts steps takes as many steps as without the rollback, with later data.
        """
        if not why_not or self.counts_steps or self.ends_by_steps:
            return 0
        end = self.run.monitor.state.loader_start if why_not == EPOCH_LOST else self.run.data.step
        return max(end - target, 0)

    def count_last_steps(self) -> None:
        """Counts the unread steps at the end of a run, on which nothing acts. Not collective."""
        for step in self.run.reader.read_due(all=True):
            self.run.data.step += self.run.reader.take_count_correction()
            self.run.log.records(step.index, step.records)
            self.run.monitor.metrics.add(step.records)
            self.run.ledger.skips += any(each.skip for each in step.records)

    def report_before_kill(self, resumed: int) -> None:
        """Reports the last rollback if the process was killed after its commit, before its event.

        Then the run resumes from the target of this rollback, which is step `resumed`. Without the
        events of earlier processes it is not known whether the rollback was reported.
        """
        run = self.run.log.run
        known = max((each.number or 0 for each in run.rollbacks), default=0)
        for done in self.run.ledger.rollbacks[-1:]:
            is_new = done.number > known and done.target == resumed
            if is_new and len(run.processes) > 1 and self.run.ranks.rank == 0:
                self.report(done)

    def report(self, done: RollbackRecord) -> None:
        """Writes the events and the console line of a rollback."""
        by = None if done.better_step is None else "earlier_weights"
        if done.attempt:
            by = "nonfinite_steps"
        elif done.intended:
            by = "intended_numbers"
        rollback = self.run.log.event(
            "rollback",
            step=done.step,
            number=done.number,
            onset=done.onset,
            cause=Cause(done.cause),
            checkpoint=done.checkpoint,
            by=by,
            outcome="done",
            lr=done.lr,
            lr_limit=done.lr_limit,
            lr_at_fault=None if done.lr is None else (done.lr_at_fault or {}).get(done.engine),
            lr_scale_before=done.lr_scale_before,
            lr_scale=done.lr_scale,
            batches=[list(each) for each in done.batches],
            steps_repeated=done.repeated or None,
            steps_lost=done.lost or None,
            why=done.why_lost or None,
            held=None if done.held is None else done.held.sentences() or None,
            moments_reset=self.run.policy.rollback.reset_moments or None,
        )
        why_not = done.why_forward
        data = f"continues forward: {why_not}" if why_not else "rewound"
        self.run.log.event("data", step=done.target, outcome=data, rewound=not why_not)
        of_data = "" if done.lost else f", data {data}"
        if done.lr is None and self.run.policy.may_limit_lr and not lr_text(rollback):
            of_data += "; the learning rate is unknown and stays as it is: pass "
            of_data += "learning_rate=rate to tx.update, so that a rollback can lower it"
        since = "" if done.intended else f", since step {done.since}"
        self.run.log.warning(
            f"step {done.index}: {reason_of(done)}{since}; {sentence(rollback)}{of_data}"
        )

    def stop(
        self,
        why: str,
        error: BaseException | None = None,
        fault: Cause = Cause(0),  # noqa: B008 -- immutable
    ) -> NoReturn:
        """Ends the run with a diagnosis; `error` with the cause `fault` is the reason, or None."""
        self.count_last_steps()
        end = self.run_end(Ending.STOPPED, why, fault=fault)
        text = diagnosis.explain(end)
        good = end.last_good
        cause = fault or None
        self.run.log.event(
            "stop", step=end.step, why=why, diagnosis=text, checkpoint=good, cause=cause
        )
        raise RunStopped(text, why, good) from error

    def run_end(self, ending: Ending, why: str = "", **fields: Any) -> RunEnd:
        """How the run ends. `why` is the reason of a stop, or the signal."""
        good = self.run.known.last_good_step
        path = next((each.path for each in self.listed() if each.step == good), None)
        lost = [each for each in self.run.ledger.rollbacks if each.lost]
        saves = self.run.store.trainer_save is None  # else no checkpoint becomes known-good
        return RunEnd(
            self.run.log.run,
            ending,
            self.run.data.step,
            self.run.monitor.counts(),
            why,
            open=self.run.monitor.is_unhealthy,
            lasting=self.run.monitor.lasting_causes,
            lr_scale=self.run.monitor.lr_scale,
            last_good=good,
            last_good_path=path,
            probation=self.run.policy.rollback.probation if saves else None,
            nonfinite_saves=tuple(self.run.known.nonfinite),
            metrics=self.run.monitor.metrics.values(),
            steps_lost=sum(each.lost for each in lost),
            why_lost=lost[-1].why_lost if lost else "",
            **fields,
        )

    def listed(self) -> list[CheckpointInfo]:
        """The checkpoints, or none if the store cannot be read."""
        try:
            return self.run.known.listed()
        except StoreError:
            return []


def reason_of(order: Order) -> str:
    """Why a rollback is ordered, as a clause."""
    if order.attempt:
        return no_finite_step(order)
    if order.intended:
        return f"{order.intended}: {INTENDED}"
    if order.better_step is not None:
        return f"the weights of step {order.better_step} are better on the same batches"
    if order.arrays:
        return nonfinite_save(order)
    return flag_names(names(Cause(order.cause))) or "ordered by a hook"


def nonfinite_save(order: Order) -> str:
    """Arrays with NaN or Inf in a save, as a clause."""
    return f"a save has found NaN or Inf in {first_of(order.arrays)}"


def no_finite_step(order: Order) -> str:
    """The reason of an attempt to bring back a dead run, as a clause."""
    steps = counted(order.index - order.since + 1, "step")
    return f"{steps} in a row had no finite gradient although the weights are finite"
