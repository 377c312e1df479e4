"""`NonfiniteRecovery`: NaN and Inf in weights, in what a checkpoint saves, and in every step.

A skipped step keeps NaN in a gradient out of the weights. NaN in the weights themselves, in the
moments of an optimizer or in statistics that the forward pass writes stays there. And one step at a
rate that is far too high can leave finite weights so large that every later forward pass overflows.
This file notices each of them, and makes a `Trouble`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from healcore.console import first_of
from healcore.core.decision import NONFINITE, Action
from healcore.runtime.data import BatchId
from healcore.runtime.reporting.nonfinite_steps import (
    FROM_START,
    IN_A_ROW,
    nonfinite_streak_text,
)
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.trouble import RollbackRecord, Trouble, TroubleCause
from healcore.runtime.run.witness.evidence import TrainedStep

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

SERIOUS = Action.ROLLBACK | Action.STOP
"""The actions that end the current attempt of a run."""
STEPS_TO_CHECK = 10
"""Steps in a row without a finite one after which the weights are checked, as in `default`."""
STEPS_TO_REVIVE = 20
"""Steps in a row without a finite one, with finite weights, after which a run goes back."""

_ACTIONS = {"alert": Action.ALERT, "rollback": Action.ROLLBACK, "stop": Action.STOP}
"""Value of `[rollback] nonfinite_state` in a policy -> the action that it asks for."""


class NonfiniteRecovery:
    """Notices NaN and Inf in the weights and in the saved state, and runs without a finite step.

    The loss and the gradients of a step are the policy's matter. What they do not show is checked
    here: the weights after many steps without a finite one, and the arrays of each save. A NaN in
    an array that no loss reads, such as a running mean, would otherwise be found only by the user.

    Args:
        run: the parts of the run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._answered: set[tuple[int, int]] = set()
        """Attempt and step of the saves with NaN or Inf that have led to a trouble."""

    def weights_are_finite(self) -> bool:
        """Whether the weights are finite on every rank. Collective.

        Inspects all weights, so it is called only where there is a reason: after many steps without
        a finite gradient, and at the end of a run.
        """
        return all(self.run.ranks.gather(self.run.driver.has_finite_weights()))

    def damage_of(self, trouble: Trouble) -> Trouble | None:
        """What the live state shows of a trouble that a rule has found. Collective.

        Skipped steps change no weights, so the last step before them has done the damage, and the
        batches of the skipped steps are not bad: every loss of damaged weights is NaN. With an
        accumulation around the optimizer, NaN in the accumulator comes from the batches of the bad
        update itself.

        Args:
            trouble: what the policy's rules have ordered.

        Returns:
            The trouble of weights with NaN or Inf; or, if the policy rolls back for a state with
            NaN, of arrays with NaN that is not allowed. Arrays that an earlier rollback has named
            do not count if the run has trained on with NaN or Inf in them. None without damage.
        """
        run, journal = self.run, self.run.journal
        if trouble.arrays or not trouble.action & SERIOUS:
            return None
        cause, arrays = TroubleCause.WEIGHTS, list[str]()
        if self.weights_are_finite():
            if run.policy.rollback.nonfinite_state != "rollback" or journal.has_micro_steps:
                return None  # NaN in an accumulator is of a window that has not ended
            cause, arrays = TroubleCause.STATE, run.saver.nonfinite_in_state()
            harmless: set[str] = set()
            for past in run.ledger.in_force:
                if past.trouble.trains_on:
                    harmless.update(past.trouble.arrays)
            if harmless.issuperset(arrays):
                return None
        first = journal.last_trained
        rollbacks = run.ledger.in_force
        if rollbacks and first is not None and first < rollbacks[-1].checkpoint:
            first = None  # the restored weights were finite
        if not journal.has_micro_steps and first is not None and first < trouble.since:
            onset = min(trouble.onset, first)
            trouble = replace(trouble, onset=onset, sound_before=True, batches=())
        is_finite = cause is TroubleCause.STATE
        return replace(trouble, cause=cause, arrays=tuple(arrays), finite=is_finite)

    def in_weights(self, result: StepResult) -> Trouble | None:
        """Weights with NaN or Inf under a policy without a rule for them. Collective.

        Such weights make every step not finite. A policy that only skips these steps would skip on
        until the next save shows the damage.

        Args:
            result: the newest step that was read.

        Returns:
            The trouble, or None if the weights are finite or the policy has a rule of its own. The
            weights are looked at once, at the `STEPS_TO_CHECK`th step in a row.
        """
        policy = self.run.policy
        streak = self.run.journal.nonfinite_streak
        action = _ACTIONS[policy.rollback.nonfinite_state]
        if streak != STEPS_TO_CHECK or policy.observes or not action & SERIOUS:
            return None
        for rule in (*policy.engine.config.rules, *policy.host_rules):
            if rule.action & SERIOUS and rule.causes & NONFINITE:
                return None  # the policy decides itself
        if self.weights_are_finite():
            return None
        return Trouble(
            cause=TroubleCause.WEIGHTS,
            onset=self.run.journal.first_consecutive(result.index),
            found_at=result.index,
            since=result.index - streak + 1,
            action=int(action),
            flags=int(result.records[0].cause),
        )

    # -- no step is finite any more -------------------------------------------------------------

    def without_finite_step(self, result: StepResult) -> Trouble | None:
        """A run in which no step is finite any more although the weights are finite. Collective.

        A shard of bad data looks the same, but ends, and then the run continues with sound weights.
        So it must lose nothing by a rollback: where the data cannot be repeated, or where an
        earlier place of this run did not change by all tries, it waits until the run would end.

        Args:
            result: the newest step that was read.

        Returns:
            The trouble, or None if there is none yet or the batch is bad instead of the weights.
        """
        run, journal = self.run, self.run.journal
        streak = journal.nonfinite_streak
        if streak not in (STEPS_TO_REVIVE, IN_A_ROW):
            return None
        if not (run.policy.rolls_back and run.policy.rollback.confirm):
            return None  # only the policy's own rules decide
        if journal.never_finite or run.monitor.nonfinite_record is None:
            return None  # a run without any finite step has nothing to go back to
        if not self.weights_are_finite():
            return None
        onset = max(run.journal.first_consecutive(result.index) - 1, 0)
        is_sound = self._earlier_weights_are_sound(result, onset)
        if is_sound is False:
            return None  # the batch is bad, and not the weights
        tries = run.ledger.same_trouble(onset)
        trouble = Trouble(
            cause=TroubleCause.NO_FINITE_STEP,
            onset=onset,
            found_at=result.index,
            since=result.index - streak + 1,
            flags=int(result.records[0].cause),
            finite=True,
            sound_before=not tries,
        )
        # What the comparisons have found is surer, and a run without finite steps cannot recover.
        verdict = run.witness.verdict_now(result.index)
        if verdict is not None:
            return verdict
        if not is_sound:
            gave_up = [each for each in run.ledger.in_force if each.accepts]
            is_bad_data = any(each.trouble.cause is TroubleCause.NO_FINITE_STEP for each in gave_up)
            if streak == STEPS_TO_REVIVE and (is_bad_data or not run.recovery.repeats_batches):
                return None
        return trouble

    def _earlier_weights_are_sound(self, result: StepResult, onset: int) -> bool | None:
        """Whether weights from before `onset` have a finite loss on the batch of a step.

        If not, the batch is bad and not the weights. None if it is not known, as without `loss_fn`.
        Collective.
        """
        witness = self.run.witness
        earlier = [each for each in witness.state.anchors if each.step <= onset]
        if not earlier or not result.contents:
            return None
        losses = witness.losses_of([TrainedStep(result.index, result.contents)], earlier[-1])
        if losses is None:
            return None
        [(_, of_earlier)] = losses
        return math.isfinite(of_earlier)

    def stop_if_never_finite(self, trouble: Trouble | None = None, *, at_end: bool = False) -> None:
        """Stops a run that trains nothing: no finite step since the start, or for many steps.

        Args:
            trouble: the trouble of the newest step, or None. A rollback cannot help a run that
                began with NaN in its weights, so such a run stops at its first trouble instead.
            at_end: whether the data have ended. Then a run without any finite step stops however
                short it was.

        Raises:
            RunStopped: the run trains nothing.
        """
        journal, monitor = self.run.journal, self.run.monitor
        streak, from_start = journal.nonfinite_streak, journal.never_finite
        longest = FROM_START if from_start else IN_A_ROW
        is_due = streak >= longest or (at_end and from_start and streak > 0)
        is_ordered = trouble is not None and trouble.action & SERIOUS
        if self.run.policy.observes or not (is_due or (from_start and is_ordered)):
            return
        weights, record = self.run.driver.nonfinite_weights(), monitor.nonfinite_record
        if record is not None and (is_due or weights):
            why = nonfinite_streak_text(record, streak, weights, from_start)
            self.run.stopping.stop(why)

    # -- arrays that are saved ------------------------------------------------------------------

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
        policy, journal = self.run.policy, self.run.journal
        if at_end:
            self.run.saver.save_if_not_finite()
        nonfinite = self.run.saver.read_nonfinite()
        attempt = len(self.run.record.attempts)
        new = {(attempt, step) for step in nonfinite} - self._answered
        self._answered |= new
        if not new:
            return None
        if policy.observes and len(nonfinite) > len(new):
            return None  # an observing policy reports the first bad save only
        first = min(nonfinite)
        action = _ACTIONS[policy.rollback.nonfinite_state]
        acts = bool(action & SERIOUS) and not policy.observes
        finite = self.weights_are_finite()
        sound = 0  # step of the newest earlier save without NaN
        for each in self.run.saver.restorable:
            if each < first:
                sound = max(sound, each)
        batches: list[BatchId] = []  # a skipped step does not undo changes by its forward pass
        if finite:
            unhealthy = journal.unhealthy_between(sound, first)
            batches = self.run.journal.batches_of(unhealthy)
        trouble = Trouble(
            cause=TroubleCause.STATE if finite else TroubleCause.WEIGHTS,
            onset=max(first - 1, 0),  # the state after that step is bad
            found_at=self.run.progress.step - 1,
            since=sound,
            action=int(action),
            finite=finite,
            sound_before=True,  # an earlier save has found no NaN or Inf
            batches=tuple(batches),
            arrays=tuple(nonfinite[first]),
            trains_on=finite and journal.healthy_steps(first, journal.next_step) > 0,
        )
        if not acts:
            return None
        return self.run.recovery.answer(trouble)

    def batch_of_nonfinite_state(self) -> Trouble | None:
        """The trouble that the newest step has made arrays NaN or Inf once more. Collective.

        A rollback for a save with NaN repeats the same batches. While the run repeats them, the
        arrays are inspected after each step: the first step after which they are not finite has
        read the batch that makes them NaN or Inf, for example an outlier that overflows in a
        running variance. The ledger alone says which arrays are inspected, and until when. So a
        restart within the repeated steps continues to inspect them.

        Returns:
            The trouble, with this batch. None if the arrays are finite, if no such steps are
            repeated, or if the data have no batches.
        """
        run = self.run
        rollbacks = run.ledger.in_force
        if not rollbacks or run.policy.observes:
            return None  # most steps end here
        last = rollbacks[-1]
        of_state = last.trouble.cause in (TroubleCause.WEIGHTS, TroubleCause.STATE)
        if not of_state or last.trouble.exact or last.rewind_obstacle:
            return None
        if not last.checkpoint < run.progress.step <= last.step:
            return None
        loader, batches = run.step_batches.last_read, tuple(run.step_batches.last_ids)
        if not batches or (loader is not None and loader.is_scan):
            return None
        arrays = last.trouble.arrays
        if arrays and {*arrays}.isdisjoint(run.saver.nonfinite_in_state()):
            return None
        if not arrays and self.weights_are_finite():
            return None
        index = run.progress.step - 1
        if any(each.trouble.exact and each.onset == index for each in rollbacks):
            return None  # another batch at the same step: the step is at fault
        return replace(
            last.trouble,
            onset=index,
            found_at=index,
            since=index,
            batches=batches,
            exact=True,
        )

    def allow(self, trouble: Trouble, tries: Sequence[RollbackRecord]) -> None:
        """Reports arrays whose NaN or Inf came back, and lets the run continue.

        A batch that was left out for them stays left out: to read it again, the run would have to
        repeat its steps once more. If the run trains on, NaN and Inf are allowed in the arrays from
        now on, after a restart too.

        Args:
            trouble: the trouble.
            tries: the rollbacks for the arrays.
        """
        if not tries:
            problem = (
                "NaN or Inf stays: the budget of rollbacks is exhausted, and the run continues"
            )
            self.run.log.problem(self.run.progress.step, f"{first_of(trouble.arrays)}: {problem}")
            return
        problem = f"{first_of(trouble.arrays)} became NaN or Inf again after a rollback, "
        if tries[-1].trouble.exact:
            step = tries[-1].onset
            problem += f"then again without the batch of step {step}, which stays skipped, "
        if trouble.trains_on:
            problem += (
                "and the run trains on with finite losses, gradients and weights: it does not "
                "read them. NaN and Inf are allowed in them from now on, as with nonfinite_ok"
            )
            self.run.record.nonfinite_ok += trouble.arrays
            self.run.store.nonfinite_ok += trouble.arrays
        else:
            problem += (
                "without any alarm and with finite weights: the run continues. If this is "
                "expected, name them in nonfinite_ok; otherwise no checkpoint becomes known-good"
            )
        self.run.log.problem(self.run.progress.step, problem)
