"""`NonfiniteRecovery`: NaN and Inf in weights, in what a checkpoint saves, and in every step.

A skipped step keeps NaN in a gradient out of the weights. NaN in the weights themselves, in the
moments of an optimizer or in statistics that the forward pass writes stays there. And one step at a
rate that is far too high can leave finite weights so large that every later forward pass overflows.
This file notices each of them, and makes a `Trouble`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from healcore.core.decision import NONFINITE, Action
from healcore.core.engine import RuleConfig
from healcore.runtime.reporting.nonfinite_steps import (
    FROM_START,
    IN_A_ROW,
    nonfinite_streak_text,
)
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.trouble import RollbackRecord, Trouble, TroubleCause

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

SERIOUS = Action.ROLLBACK | Action.STOP
"""The actions that end the current attempt of a run."""
STEPS_TO_CHECK = 10
"""Steps in a row without a finite one after which the weights are checked, without a rule."""
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
        self._action = _ACTIONS[run.policy.rollback.nonfinite_state]
        self._not_by_a_batch = 0
        """Number of the rollback whose repeat has shown that no batch alone makes NaN or Inf."""
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
            NaN, of arrays with NaN that is not allowed. None without damage.
        """
        run, journal = self.run, self.run.journal
        if trouble.arrays or not trouble.action & SERIOUS:
            return None
        cause, arrays = TroubleCause.WEIGHTS, list[str]()
        if self.weights_are_finite():
            if self._action is not Action.ROLLBACK or journal.has_micro_steps:
                return None  # NaN in an accumulator is of a window that has not ended
            cause, arrays = TroubleCause.STATE, run.saver.nonfinite_in_state()
            if not arrays:
                return None
        first, rollbacks = journal.last_trained, run.ledger.in_force
        if rollbacks and first is not None and first < rollbacks[-1].checkpoint:
            first = None  # the restored weights were finite
        if not journal.has_micro_steps and first is not None and first < trouble.since:
            onset = min(trouble.onset, first)
            trouble = replace(trouble, onset=onset, sound_before=True, batches=())
        return replace(trouble, cause=cause, arrays=tuple(arrays), finite=bool(arrays))

    # -- many steps without a finite one --------------------------------------------------------

    def in_a_row(self, result: StepResult) -> Trouble | None:
        """The trouble of many steps without a finite one. Collective.

        Weights or saved arrays have NaN or Inf. They are looked at after as many steps in a row, or
        in a window, as the policy's rules for NaN say: a skip is exact, so a rollback for NaN needs
        this evidence. Or the weights are finite, and yet no step is.

        Args:
            result: the newest step that was read.

        Returns:
            The trouble, or None if there is none yet.
        """
        run, policy, journal = self.run, self.run.policy, self.run.journal
        streak, index = journal.nonfinite_streak, result.index
        if not streak or policy.observes:
            return None
        first = journal.first_consecutive(index)
        trouble = Trouble(
            onset=first,
            found_at=index,
            since=index - streak + 1,
            action=int(Action.ROLLBACK if policy.host_rules else self._action),
            flags=int(result.records[0].cause),
        )
        rules = policy.host_rules or (RuleConfig(NONFINITE, consecutive=STEPS_TO_CHECK),)
        for rule in policy.engine.config.rules:
            if rule.action & SERIOUS and rule.causes & NONFINITE:
                rules = ()  # the policy decides itself
        for rule in rules:
            hits, needed = streak, rule.consecutive
            if rule.within:
                recent = journal.unhealthy_between(index + 1 - rule.within, index + 1)
                hits, needed = len(recent), rule.count
            if hits == needed:
                damage = self.damage_of(trouble)
                if damage is not None:
                    return damage
        if streak not in (STEPS_TO_REVIVE, IN_A_ROW) or journal.never_finite:
            return None  # a run without any finite step has nothing to go back to
        if not (policy.rolls_back and policy.rollback.confirm) or not self.weights_are_finite():
            return None  # only the policy's own rules decide
        # What the comparisons have found is surer, and a run without finite steps cannot recover.
        verdict = run.witness.verdict_now()
        if verdict is not None:
            return verdict
        # A shard of bad data looks the same, but ends, and then the run continues with sound
        # weights. So it must lose nothing by a rollback: where the data cannot be repeated, or
        # where all tries have changed nothing before, it waits until the run would end.
        dead = TroubleCause.NO_FINITE_STEP
        past = [each for each in run.ledger.in_force if each.trouble.cause is dead]
        is_bad_data = any(each.accepts for each in past) or not run.recovery.repeats_batches
        if is_bad_data and streak == STEPS_TO_REVIVE:
            return None
        onset = max(first - 1, 0)
        sound = not run.ledger.same_trouble(onset)
        return replace(trouble, cause=dead, onset=onset, finite=True, sound_before=sound)

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
        journal, record = self.run.journal, self.run.monitor.nonfinite_record
        streak, from_start = journal.nonfinite_streak, journal.never_finite
        is_due = streak >= (FROM_START if from_start else IN_A_ROW)
        is_due = is_due or (at_end and from_start and streak > 0)
        is_ordered = trouble is not None and trouble.action & SERIOUS
        if self.run.policy.observes or not (is_due or (from_start and is_ordered)):
            return
        weights = self.run.driver.nonfinite_weights()
        if record is not None and (is_due or weights):
            self.run.stopping.stop(nonfinite_streak_text(record, streak, weights, from_start))

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
        run = self.run
        if at_end:
            run.saver.save_if_not_finite()
        nonfinite = run.saver.read_nonfinite()
        attempt = len(run.record.attempts)
        new = {(attempt, step) for step in nonfinite} - self._answered
        self._answered |= new
        if not new or run.policy.observes or not self._action & SERIOUS:
            return None
        first, finite = min(nonfinite), self.weights_are_finite()
        earlier = [each for each in run.saver.restorable if each < first]
        sound = max(earlier, default=0)  # the newest earlier save without NaN
        return run.recovery.answer(
            Trouble(
                cause=TroubleCause.STATE if finite else TroubleCause.WEIGHTS,
                onset=max(first - 1, 0),  # the state after that step is bad
                found_at=run.progress.step - 1,
                since=sound,
                action=int(self._action),
                finite=finite,
                sound_before=True,  # an earlier save has found no NaN or Inf
                arrays=tuple(nonfinite[first]),
            )
        )

    def batch_of_nonfinite_state(self) -> Trouble | None:
        """The trouble that the newest step has made arrays NaN or Inf once more. Collective.

        A rollback for a save with NaN repeats the same batches. While the run repeats them, the
        arrays are inspected after each step: the first step after which they are not finite has
        read the batch that makes them NaN or Inf, for example an outlier that overflows in a
        running variance. The ledger alone says which arrays are inspected, and until when. So a
        restart within the repeated steps continues to inspect them. A step at which several batches
        have done it is at fault itself, and the rest of its repeat is not inspected.

        Returns:
            The trouble, with this batch. None if the arrays are finite, if no such steps are
            repeated, or if the data have no batches.
        """
        run, index = self.run, self.run.progress.step - 1
        rollbacks = run.ledger.in_force
        if not rollbacks or run.policy.observes:
            return None  # most steps end here
        last = rollbacks[-1]
        of_state = last.trouble.cause in (TroubleCause.WEIGHTS, TroubleCause.STATE)
        is_repeat = last.checkpoint <= index < last.step and not last.rewind_obstacle
        loader, batches = run.step_batches.last_read, tuple(run.step_batches.last_ids)
        is_scan = loader is not None and loader.is_scan
        if not (of_state and is_repeat and batches) or is_scan:
            return None
        if last.number == self._not_by_a_batch or not run.saver.nonfinite_in_state():
            return None
        # Another batch at the same step: the step is at fault. But where gradients accumulate, a
        # step keeps what its batch brings, and bad batches in a row all come to the same step.
        most = 1
        if run.journal.has_micro_steps:
            most = STEPS_TO_CHECK
        at_step = [each for each in rollbacks if each.trouble.exact and each.onset == index]
        if len(at_step) >= most:
            self._not_by_a_batch = last.number
            return None
        return replace(
            last.trouble, onset=index, found_at=index, since=index, batches=batches, exact=True
        )
