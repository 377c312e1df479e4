"""`Recovery`: answers the records of steps with rollbacks.

Each reason to roll back (`OrderReason`) has its file in this folder:

    RULE, HOOK                           `Recovery.carry_out_order`
    SAVED_NAN, BATCH, WEIGHTS_NAN        `nonfinite`
    DEAD_RUN                             `dead_run`
    BETTER_WEIGHTS, INTENDED             `better_weights`

All of them make an `Order`. `Recovery.roll_back` has it carried out, and the loop then continues at
the step of the restored checkpoint:

    find_order(step)                   log and monitor the step; an order of the policy, or None
    act(step, order)                   the order, or one of the other reasons to roll back
        roll_back(order)               the restore, events, the undone steps are forgotten

Where no rollback can help, the run stops (`ending/stopping.py`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from healcore.console import counted, first_of, passes_power_of_ten
from healcore.core.decision import NONFINITE, Action, Cause, names_of
from healcore.events.sentences import flags_text
from healcore.runtime.data.loader_registry import EPOCH_LOST
from healcore.runtime.data.rewind_obstacle import RewindObstacle
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.missing_rate import MissingRate
from healcore.runtime.run.orders import Order, OrderReason, RollbackRecord
from healcore.runtime.run.rollback.host_rules import HostRules
from healcore.runtime.run.rollback.nonfinite import SERIOUS
from healcore.runtime.run.rollback.report import nonfinite_save, reason_of, report_rollback
from healcore.runtime.store.checkpoints import NoGoodCheckpoint, StateMismatch, StoreError

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


class Recovery:
    """Processes the steps that the loop reads, and carries out orders of rules and comparisons.

    It is the place where a run decides to roll back, to save or to stop. `RollbackRestore` does the
    rollback, `Stopping` the stop, and `Loop` calls this class between two steps.

    Args:
        run: the parts of the run.
        ends_by_steps: whether a trainer takes a given number of steps, from as many batches as they
            need.

    Attributes:
        counts_steps: whether the loop asks for the number of each step, so that a rollback repeats
            steps also where healcore reads no data for the loop.
    """

    def __init__(self, run: Run, *, ends_by_steps: bool) -> None:
        self.run = run
        policy, state = run.policy, run.monitor.state
        self._host_rules = HostRules(policy.host_rules, policy.engine.config, state)
        self.counts_steps = False
        self._ends_by_steps = ends_by_steps
        self._missing_rate = MissingRate(run)
        self._declined: Counter[str] = Counter()
        """Reason -> declined orders, to log lasting trouble only now and then."""

    def note_counted_steps(self) -> None:
        """Notes that the loop asks for the number of each step, see `counts_steps`."""
        self.counts_steps = True

    def find_order(self, result: StepResult) -> Order | None:
        """Finds the order for a step that was read. Logs the step, and gives it to the monitor.

        Args:
            result: the oldest step that was not given to this method yet.

        Returns:
            The order that the rules of the policy or a hook give, or None.
        """
        # A dispatch may have more or fewer steps than `PendingDispatch.count`.
        self.run.progress.step += self.run.dispatch_queue.take_count_correction()
        records = [self._host_rules.with_rollback_order(each) for each in result.records]
        held = self.run.holding.held
        if held.norms:  # a step has few calls
            records = held.with_thresholds(result.index, records)
        result = result._replace(records=self.run.monitor.metrics.with_loss_ratios(records))
        self.run.log.records(
            result.index,
            result.records,
            several=self.run.monitor.metrics.has_several_engines,
            steps_at_once=result.steps_at_once,
        )
        self.run.dead_run.trained_rates.add(result.records)
        if not self._missing_rate.is_done:
            self._missing_rate.note_step(result.records)
        order = self.run.monitor.note_step(result)
        if self.run.monitor.state.nonfinite_streak == 1:
            self.run.dead_run.trained_rates.add_rates(self.run.rate_log.rates_in_force())
        return order

    def act(self, result: StepResult, order: Order | None) -> RollbackRecord | None:
        """Decides after a step whether the run rolls back, and carries out the rollback.

        The order of the calls is part of the decision:

        1. Without an order, NaN or Inf in the weights make one
           (`NonfiniteRecovery.order_for_damage`).
        2. A run in which no step is finite any more rolls back (`DeadRun.revive`), and the order is
           dropped.
        3. A run that trains nothing stops (`NonfiniteRecovery.stop_if_never_finite`).
        4. The weights are compared with earlier weights (`BetterWeights.compare`).
        5. The order is carried out, or without an order the verdict of the comparison.
        6. Without both, values that the program has kept for long are accepted
           (`BetterWeights.accept_intended`).

        Args:
            result: the step.
            order: the result of `find_order` for the step.

        Returns:
            The rollback, or None if the run continues with the next step.

        Raises:
            RunStopped: the order stops the run, or the run trains nothing any more.
        """
        if order is None:
            order = self.run.nonfinite_recovery.order_for_damage(result)
        revived = self.run.dead_run.revive(result)
        if revived is not None:
            return revived
        self.run.nonfinite_recovery.stop_if_never_finite(order)
        verdict = self.run.better_weights.compare(result)
        if order is not None:
            return self.carry_out_order(order)
        if verdict is not None:
            return self.run.better_weights.carry_out_verdict(verdict)
        return self.run.better_weights.accept_intended(result.index)

    def carry_out_order(self, order: Order) -> RollbackRecord | None:
        """Carries out an order of the policy, of a hook, or because of NaN.

        Under `[rollback] confirm` an order of the policy needs evidence that the model is worse:
        weights or state with NaN or Inf. All other evidence comes from the comparisons. Weights
        that are not finite do not recover, so a verdict that waits for a recovery is carried out
        now.

        Args:
            order: what to do. An order without the action rollback or stop does nothing here: the
                monitor has written its alert, and `Loop.read_and_act` saves.

        Returns:
            The rollback, or None without one.

        Raises:
            RunStopped: the order stops the run, or its budget of rollbacks is exhausted.
        """
        is_damaged = self.run.nonfinite_recovery.is_damaged(order)
        needs_evidence = self._needs_evidence(order)
        if is_damaged:
            order = self._from_damaging_step(order)
        if needs_evidence and is_damaged:
            by = "state" if self.run.nonfinite_recovery.weights_are_finite() else "weights"
            cause = Cause(order.cause)
            self.run.log.assessment(order.index, order.onset, "damage", by, cause=cause)
        elif needs_evidence:
            return self._decline(order, "nothing", self._missing_evidence(order))
        if order.action & Action.STOP:
            self.run.stopping.stop(self._stop_reason(order), onset=order.onset)
        if not order.action & Action.ROLLBACK:
            return None
        if is_damaged:
            verdict = self.run.comparisons.suspicion.pending(order.index)
            if verdict is not None:
                better = self.run.better_weights.carry_out_verdict(verdict, finite=False)
                if better is not None:
                    return better
        return self._roll_back_within_budget(order, needs_evidence=needs_evidence)

    def _from_damaging_step(self, order: Order) -> Order:
        """An order for damage, from the step that has done it: the last one that was trained.

        Skipped steps change no weights, so the last step before them has done the damage. With an
        accumulation around the optimizer, NaN in the accumulator comes from the batches of the bad
        update itself, and the order stays as it is.
        """
        state = self.run.monitor.state
        first = state.last_trained
        if state.has_micro_steps or first is None or first >= order.first_alarm_of_cause:
            return order
        return replace(
            order,
            onset=min(order.onset, first),
            sound_until_onset=True,
            batches=tuple(state.batches_between(first, order.index)),
        )

    def _missing_evidence(self, order: Order) -> str:
        """Why nothing shows that the model is worse, as a clause."""
        if self.run.comparisons.is_enabled:
            return "no comparison shows that the weights are worse"
        if order.cause & NONFINITE:
            return "the weights are finite"
        return "healcore cannot tell without loss_fn whether the model is worse"

    def _roll_back_within_budget(
        self, order: Order, *, needs_evidence: bool
    ) -> RollbackRecord | None:
        """Rolls back, if the policy's budget has a rollback left for this trouble.

        Otherwise stops the run. An order that needed evidence and found it in the state only is
        declined instead: weights that are finite may still train.
        """
        # The engine's budget does not limit the rollbacks for one trouble: healthy repeated steps
        # refund it, and rollbacks by a hook do not use it.
        policy, ledger = self.run.policy.budget, self.run.ledger
        reach = max(policy.refund_after, 1)
        count = len(self._spent_on(order, reach))
        if order.onset <= self.run.record.first_step + reach:
            count += ledger.spent  # by a run in another framework, whose engine was ported
        budget = max(policy.recoveries, 1)
        if count < budget:
            is_last = count + 1 == budget and not order.is_harmless
            return self.roll_back(replace(self._with_depth_and_limit(order), is_last=is_last))
        if order.is_harmless:
            self._report_impossible(order, NoGoodCheckpoint("the budget of rollbacks is exhausted"))
            return None
        if not needs_evidence or not self.run.nonfinite_recovery.weights_are_finite():
            rollbacks = counted(count, "rollback has", "rollbacks have")
            why = f"{rollbacks} been made within {counted(reach, 'step')} of the run"
            self.run.stopping.stop(why, onset=order.onset)
        return self._decline(order, "budget", "the budget of rollbacks is exhausted")

    def _spent_on(self, order: Order, within: int) -> list[RollbackRecord]:
        """The earlier rollbacks that count for an order.

        A rollback for arrays that the run does not train on says nothing about a later trouble, and
        neither does the skip of one batch for them.

        Args:
            order: the order.
            within: see `Ledger.same_trouble`.
        """
        past = self.run.ledger.same_trouble(order.onset, within)
        if order.is_harmless:
            return past
        return [each for each in past if not each.order.is_harmless]

    def _needs_evidence(self, order: Order) -> bool:
        """Whether an order needs evidence. Only rules need it, and not a rule that stops."""
        if not self.run.policy.rollback.confirm or not order.action & SERIOUS:
            return False
        if order.reason is not OrderReason.RULE:
            return False
        for rule in self.run.policy.engine.config.rules:
            if rule.action & Action.STOP and rule.causes & order.cause:
                return False
        return True

    def _decline(self, order: Order, by: str, why: str) -> None:
        """Declines an order, and logs that the run continues without it.

        Args:
            order: the order.
            by: what decided, for the event: "nothing" without evidence, or "budget".
            why: the reason, as a clause. Of lasting trouble only the 1st, 10th, 100th, ... decline
                for a reason has a line.
        """
        cause = Cause(order.cause)
        self.run.log.assessment(order.index, order.onset, "unknown", by, cause=cause)
        times = self._times_to_log(why)
        if times:
            cause_names = flags_text(names_of(cause))
            line = f"step {order.index}: no rollback for {cause_names}, because {why}"
            if times > 1:
                line += f" ({times} times so far)"
            self.run.log.info(line)

    def _times_to_log(self, why: str) -> int:
        """Counts an order that is not carried out for a reason.

        Returns:
            How often the reason has occurred, or 0 if this time has no line.
        """
        self._declined[why] += 1
        times = self._declined[why]
        if passes_power_of_ten(times - 1, times):
            return times
        return 0

    def _with_depth_and_limit(self, order: Order) -> Order:
        """An order of the policy with its depth and learning-rate limit.

        The rate is limited if an earlier rollback for the same trouble has not helped.
        """
        past = self._spent_on(order, self.run.policy.rollback.region)
        if order.reason is OrderReason.RULE:
            rollback = self.run.policy.engine.config.rollback
            order = replace(order, depth=rollback.depth + rollback.deepen * len(past))
        if self.run.policy.may_limit_lr and past and not order.is_harmless:
            return order.with_changes(lr_at_fault={})
        return order

    def _stop_reason(self, order: Order) -> str:
        """Why an order stops the run, as a clause."""
        if order.reason is OrderReason.SAVED_NAN:
            return nonfinite_save(order)
        if order.reason is OrderReason.WEIGHTS_NAN:
            return "the weights have NaN or Inf"
        if order.reason is OrderReason.HOOK:
            return "an on_incident hook stopped it"
        engines = self.run.driver.engines().values()
        if any(engine["state"]["budget"]["recoveries"] == 0 for engine in engines):
            return "the budget of recoveries is exhausted, and the trouble continues"
        return "a rule of the policy stops it"

    def roll_back(self, order: Order) -> RollbackRecord | None:
        """Restores a checkpoint for an order, reports the rollback, and forgets the undone steps.

        Args:
            order: what to restore, and what to change when the steps are repeated.

        Returns:
            The rollback. None if no checkpoint is usable for better earlier weights or for a dead
            run: then the run continues, and the steps that were read meanwhile are due again.

        Raises:
            RunStopped: no checkpoint is usable, and the weights are damaged.
        """
        # Unread steps belong to the trouble up to their last alarm.
        unread = list(self.run.dispatch_queue.read_all())
        self.run.progress.step += self.run.dispatch_queue.take_count_correction()
        skips = 0
        for late in unread:
            if any(each.skip for each in late.records):
                skips += 1
        self.run.ledger.skips += skips
        if not order.reason.is_optional:
            of_alarms = self.run.monitor.batches_of_alarms(unread)
            order = replace(order, batches=(*order.batches, *of_alarms))
        try:
            lr_scale = self.run.rate_log.lr_scale
            done = self.run.rollback_restore.restore(order, self._lost_steps, lr_scale)
        except StoreError as error:
            if not self._may_continue(order, error):
                self.run.stopping.stop(str(error), onset=order.onset)
            self._report_impossible(order, error)
            self.run.ledger.skips -= skips
            self.run.dispatch_queue.make_due_again(unread)  # their own orders are carried out next
            return None
        report_rollback(self.run, done)
        self.run.batches.on_rollback(done.continues_at)
        self.run.dispatch_queue.forget_accumulation()
        self.run.nonfinite_recovery.on_rollback()
        self.run.rate_log.on_rollback(done)
        self.run.monitor.read_engines()
        return done

    def _report_impossible(self, order: Order, error: StoreError) -> None:
        """Logs that no checkpoint can be restored for an order, and that the run continues.

        Where every step orders a rollback, only the 1st, 10th, 100th, ... has a line.
        """
        why = reason_of(order)
        if self._times_to_log(why):
            reason = str(error)
            if isinstance(error, StateMismatch):
                # The advice in its text is for a start, and not for a rollback.
                reason = f"the checkpoint of step {error.step} does not fit: "
                reason += first_of(error.differences, separator="; ")
            problem = f"{why}, but {reason}; the run continues without a rollback"
            self.run.log.problem(self.run.progress.step, problem)

    def _lost_steps(self, target: int, obstacle: RewindObstacle | None) -> int:
        """Steps since `target` that the loop does not repeat, where the data was not rewound.

        A loop that counts steps takes as many steps as without the rollback, with later data.
        """
        if obstacle is None or self.counts_steps or self._ends_by_steps:
            return 0
        end = self.run.progress.step
        if obstacle == EPOCH_LOST:
            end = self.run.monitor.state.loader_start
        return max(end - target, 0)

    def _may_continue(self, order: Order, error: StoreError) -> bool:
        """Whether the run can continue although an order could not be carried out. Collective.

        A rollback to better weights, of a dead run, or for one batch is optional. If no checkpoint
        fits the structure of the model, the run continues as long as its weights are finite. After
        any other error the live state may have changed in part.
        """
        if order.reason.is_optional:
            return isinstance(error, NoGoodCheckpoint | StateMismatch)
        if not isinstance(error, StateMismatch):
            return False
        return order.is_harmless or self.run.nonfinite_recovery.weights_are_finite()
