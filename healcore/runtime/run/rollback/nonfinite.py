"""`NonfiniteRecovery`: what is done about NaN and Inf in weights, or in what a checkpoint saves.

A skipped step keeps NaN in a gradient out of the weights. NaN in the weights themselves, in the
moments of an optimizer or in statistics that the forward pass writes stays there. Every later step
is then skipped, or trained with damaged values, until a checkpoint from before is restored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from healcore.console import first_of
from healcore.core.decision import NONFINITE, Action
from healcore.runtime.reporting.nonfinite_steps import (
    FROM_START,
    IN_A_ROW,
    nonfinite_streak_text,
)
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.orders import Order, OrderReason, RollbackRecord
from healcore.runtime.run.rollback.report import reason_of

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

SERIOUS = Action.ROLLBACK | Action.STOP
"""The actions that end the current attempt of a run."""
STEPS_TO_CHECK = 10
"""Steps in a row without a finite one after which the weights are checked, as in `default`."""

_ACTIONS = {"alert": Action.ALERT, "rollback": Action.ROLLBACK, "stop": Action.STOP}
"""Value of `[rollback] nonfinite_state` in a policy -> the action that it asks for."""


class NonfiniteRecovery:
    """Decides about NaN and Inf in the weights and in the saved state.

    The loss and the gradients of a step are the policy's matter. What they do not show is checked
    here: the weights after many steps without a finite one, and the arrays of each save. A NaN in
    an array that no loss reads, such as a running mean, would otherwise be found only by the user.

    Args:
        run: the parts of the run. This class uses more than eight of them, also `recovery`, which
            is made later.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._answered_saves = 0
        """Number of saves with NaN or Inf in this attempt that have led to an order."""
        self._may_skip = True
        """Whether a batch may still be skipped in this attempt. It becomes False with the first
        order to skip a batch: if the order cannot be carried out, it is not given again."""

    def on_rollback(self) -> None:
        """Forgets the saves of the undone steps. `KnownCheckpoints` forgets its findings too.

        Without this, the first finding of the repeated steps would look like one that was answered
        already.
        """
        self._answered_saves = 0
        self._may_skip = True

    def weights_are_finite(self) -> bool:
        """Whether the weights are finite on every rank. Collective.

        Inspects all weights, so it is called only where there is a reason: after many steps without
        a finite gradient, and at the end of a run.
        """
        return all(self.run.ranks.gather(self.run.driver.has_finite_weights()))

    def is_damaged(self, order: Order) -> bool:
        """Whether the live state shows that an order of the engine is right. Collective.

        Args:
            order: an order by the policy's rules. An order because of a save has named its arrays
                already, and needs no second look.

        Returns:
            True if the weights have NaN or Inf; or, if the policy rolls back for a state with NaN,
            if any array of the state has NaN that is not allowed. Arrays that an earlier rollback
            has named do not count if the run has trained on with NaN or Inf in them.
        """
        if order.arrays or not order.action & SERIOUS:
            return False
        if not self.weights_are_finite():
            return True
        if self.run.policy.rollback.nonfinite_state != "rollback":
            return False
        if self.run.monitor.state.has_micro_steps:
            return False  # NaN in an accumulator is of a window that has not ended
        harmless: set[str] = set()
        for past in self.run.ledger.in_force:
            if past.order.untrained:
                harmless.update(past.order.arrays)
        return not harmless.issuperset(self.run.saver.nonfinite_in_state())

    def order_for_damage(self, result: StepResult) -> Order | None:
        """The order for weights with NaN or Inf under a policy without a rule for them. Collective.

        Such weights make every step not finite. A policy that only skips these steps would skip on
        until the next save shows the damage.

        Args:
            result: the newest step that was read.

        Returns:
            The order, or None if the weights are finite or the policy has a rule of its own. The
            weights are looked at once, at the `STEPS_TO_CHECK`th step in a row.
        """
        policy, state = self.run.policy, self.run.monitor.state
        streak = state.nonfinite_streak or 0
        action = _ACTIONS[policy.rollback.nonfinite_state]
        if streak != STEPS_TO_CHECK or policy.observes or not action & SERIOUS:
            return None
        for rule in (*policy.engine.config.rules, *policy.host_rules):
            if rule.action & SERIOUS and rule.causes & NONFINITE:
                return None  # the policy decides itself
        if self.weights_are_finite():
            return None
        first = result.index - streak + 1
        return Order(
            index=result.index,
            onset=self.run.ledger.first_consecutive(result.index),
            first_alarm_of_cause=first,
            reason=OrderReason.WEIGHTS_NAN,
            action=int(action),
            cause=int(result.records[0].cause),
            batches=tuple(state.batches_between(first, result.index)),
        )

    def stop_if_never_finite(self, order: Order | None = None, *, at_end: bool = False) -> None:
        """Stops a run that trains nothing: no finite step since the start, or for many steps.

        Args:
            order: the order of the newest step, or None. A rollback cannot help a run that began
                with NaN in its weights, so such a run stops at its first order instead.
            at_end: whether the data have ended. Then a run without any finite step stops however
                short it was.

        Raises:
            RunStopped: the run trains nothing.
        """
        monitor = self.run.monitor
        streak, from_start = monitor.state.nonfinite_streak or 0, monitor.state.never_finite
        longest = FROM_START if from_start else IN_A_ROW
        is_due = streak >= longest or (at_end and from_start and streak > 0)
        is_ordered = order is not None and order.action & SERIOUS
        if self.run.policy.observes or not (is_due or (from_start and is_ordered)):
            return
        weights, record = self.run.driver.nonfinite_weights(), monitor.nonfinite_record
        if record is not None and (is_due or weights):
            why = nonfinite_streak_text(record, streak, weights, from_start)
            self.run.stopping.stop(why)

    def roll_back_if_saved(self, *, at_end: bool = False) -> RollbackRecord | None:
        """Rolls back if the saves so far have new NaN or Inf. Collective.

        Moments, or statistics that the forward pass writes, may be damaged while loss and gradients
        look healthy. The check runs before the next save, whether or not the disk is slow, so that
        the result depends on the steps only.

        Args:
            at_end: whether an epoch has ended. Then weights that are not finite are saved first,
                so that this check sees them.

        Returns:
            The rollback, or None without one.

        Raises:
            RunStopped: the policy stops a run for a state with NaN, or no rollback is left.
        """
        policy = self.run.policy
        if at_end:
            self.run.saver.save_if_not_finite()
        nonfinite = self.run.known_checkpoints.read_nonfinite()
        new = len(nonfinite) - self._answered_saves
        self._answered_saves = len(nonfinite)
        if not new:
            return None
        if policy.observes and len(nonfinite) > new:
            return None  # an observing policy reports the first bad save only
        first = min(nonfinite)
        action = _ACTIONS[policy.rollback.nonfinite_state]
        acts = bool(action & SERIOUS) and not policy.observes
        finite = self.weights_are_finite()
        order = self._order_for_save(first, nonfinite[first], action, finite=finite)
        if acts and finite:
            ledger = self.run.ledger
            trains_on = ledger.healthy_steps(first, ledger.next_step) > 0
            past = self._past_without_alarm(order, first)
            if past:
                self._accept(order, past, allow=trains_on)
                return None
            order = replace(order, untrained=trains_on)
        why = f"checkpoint {first} has NaN or Inf in {first_of(order.arrays, 10)}"
        self.run.log.event(
            "order", step=order.index, cause=[], action=action, why=why, observed=policy.observes
        )
        if not acts:
            return None
        return self.run.recovery.carry_out_order(order)

    def came_back(self) -> tuple[str, ...]:
        """Names of the arrays in which NaN or Inf has come back after a rollback.

        A rollback for a save with NaN repeats the same batches. While the run repeats them, this
        method inspects the arrays after each step. The first step after which they are not finite
        has read the batch that makes them NaN or Inf: for example, an outlier that overflows in a
        running variance.

        The ledger alone says which arrays are inspected, and until when. So a restart within the
        repeated steps continues to inspect them. Collective, if the ledger has such a rollback.

        Returns:
            The names, sorted. Empty if the arrays are finite, or if no such steps are repeated.
        """
        if not self.run.ledger.rollbacks:
            return ()  # most steps end here
        rollbacks = self.run.ledger.in_force
        if not rollbacks or not self._may_skip or self.run.policy.observes:
            return ()
        last = rollbacks[-1]
        if last.order.reason is not OrderReason.SAVED_NAN:
            return ()
        if last.batches or last.rewind_obstacle:
            return ()  # a batch was skipped already, or the steps have other batches
        if not last.continues_at < self.run.progress.step <= last.onset + 1:
            return ()
        if self.run.policy.rollback.nonfinite_state != "rollback":
            return ()
        return tuple(self.run.saver.nonfinite_in_state(last.order.arrays))

    def skip_last_batch(self, arrays: tuple[str, ...]) -> RollbackRecord | None:
        """Rolls back once more, and skips the batch that makes arrays NaN or Inf. Collective.

        If NaN or Inf comes back after another batch, the program itself writes it: the next save
        that finds it is reported, and no other batch is skipped.

        Args:
            arrays: result of `came_back` for the newest step.

        Returns:
            The rollback, or None if the data has no batches or no rollback is left.
        """
        loader = self.run.step_batches.last_read
        batches = tuple(self.run.step_batches.last_ids)
        if loader is not None and loader.is_scan:
            batches = ()
        self._may_skip = False
        if not batches:
            return None
        index = self.run.progress.step - 1
        order = Order(
            index=index,
            onset=index,
            first_alarm_of_cause=index,
            reason=OrderReason.BATCH,
            batches=batches,
            sound_until_onset=True,  # all arrays were finite after each step before
            arrays=arrays,
            untrained=self.run.ledger.in_force[-1].order.untrained,
        )
        why = reason_of(order)
        self.run.log.event("order", step=index, cause=[], action=Action.ROLLBACK, why=why)
        return self.run.recovery.carry_out_order(order)

    def _order_for_save(
        self, first: int, arrays: tuple[str, ...], action: Action, *, finite: bool
    ) -> Order:
        """The order for the first save with NaN or Inf.

        Without an alarm, and with finite weights, no batch is skipped: the damage by a bit flip
        does not come back, and NaN that comes back is written by the program itself.

        Args:
            first: step of the save.
            arrays: names of the arrays with NaN or Inf.
            action: what the policy asks for.
            finite: whether the weights are finite now.
        """
        state = self.run.monitor.state
        sound = 0  # step of the newest earlier save without NaN
        for each in self.run.known_checkpoints.restorable:
            if each < first:
                sound = max(sound, each)
        bad = self.run.ledger.unhealthy_between(sound, first)
        if not bad and not finite:
            bad = list(range(sound, first))
        last = state.last_trained
        if bad and last is not None and sound <= last < bad[0]:
            bad.insert(0, last)  # no step has been trained after the damage
        return Order(
            index=self.run.progress.step - 1,
            onset=max(first - 1, 0),  # the state after that step is bad
            first_alarm_of_cause=sound,
            reason=OrderReason.SAVED_NAN,
            action=int(action),
            batches=tuple(state.batches_of(bad)),
            sound_until_onset=True,  # an earlier save has found no NaN or Inf
            arrays=tuple(arrays),
        )

    def _past_without_alarm(self, order: Order, first: int) -> list[RollbackRecord]:
        """The rollbacks for the same arrays, oldest first. Empty if an alarm explains the NaN.

        If there is one, the program itself writes NaN or Inf into the arrays. Another rollback
        would bring them back once more.

        Args:
            order: the order for the save.
            first: step of the first save with NaN or Inf.
        """
        ledger = self.run.ledger
        if ledger.unhealthy_between(order.first_alarm_of_cause, first):
            return []
        found: list[RollbackRecord] = []
        for past in ledger.same_trouble(order.onset, self.run.policy.rollback.region):
            if {*order.arrays} <= {*past.order.arrays}:
                found.append(past)
        return found

    def _accept(self, order: Order, past: Sequence[RollbackRecord], *, allow: bool) -> None:
        """Reports arrays whose NaN or Inf came back, and lets the run continue.

        A batch that was skipped for them stays skipped: to read it again, the run would have to
        repeat its steps once more.

        Args:
            order: the order for the save.
            past: the rollbacks for the arrays.
            allow: whether healthy steps have followed, so that the run does not train on the
                arrays. NaN and Inf are then allowed in them, after a restart too.
        """
        problem = f"{first_of(order.arrays)} became NaN or Inf again after a rollback, "
        if past[-1].order.reason is OrderReason.BATCH:
            step = past[-1].onset
            problem += f"then again without the batch of step {step}, which stays skipped, "
        if allow:
            problem += (
                "and the run trains on with finite losses, gradients and weights: it does not "
                "read them. NaN and Inf are allowed in them from now on, as with nonfinite_ok"
            )
            self.run.record.nonfinite_ok += order.arrays
            self.run.store.nonfinite_ok += order.arrays
        else:
            problem += (
                "without any alarm and with finite weights: the run continues. If this is "
                "expected, name them in nonfinite_ok; otherwise no checkpoint becomes known-good"
            )
        self.run.log.problem(self.run.progress.step, problem)
