"""A dead run: no step is finite any more, although the weights are finite.

One step at a rate that is far too high can leave weights so large that every later forward pass
overflows. Each such step is skipped, so nothing changes any more. A shard of bad data looks the
same, but ends, and then the run continues with sound weights. Without a `loss_fn` the two cannot be
distinguished, so a run is brought back in a way that costs a bad shard repeated steps and no bits:

1. Repeat from the newest checkpoint before the last trained step, and change nothing. Damage by a
   bit flip does not come back. A bad shard comes back at the same step, after the same steps.
2. Repeat from an older checkpoint, at a limited learning rate: a rate that the program raises comes
   back with the repeated steps.
3. If the rate has not helped either, undo the limit and repeat from a still older checkpoint. From
   here on the run is as it was before the first revival, and no other revival is for this place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

from healcore.core.step_record import StepRecord
from healcore.runtime.driver import Rates
from healcore.runtime.reporting.nonfinite_steps import IN_A_ROW
from healcore.runtime.run.compare.trained_step import TrainedStep
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.engine_states import lr_states
from healcore.runtime.run.monitor_state import MonitorState
from healcore.runtime.run.orders import Order, OrderReason, RepeatChanges, RollbackRecord
from healcore.runtime.store.ranks import broadcast

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

STEPS_TO_REVIVE = 20
"""Steps in a row without a finite one after which a run is brought back."""


class Revival(IntEnum):
    """What a run changes when it is brought back, in this order. A checkpoint holds the value."""

    REPEAT = 1  # nothing
    LIMIT_RATE = 2  # the learning rate is limited to the last healthy rate
    UNDO = 3  # the limit of the second revival is undone


def next_revival(
    streak: int, rollbacks: Sequence[RollbackRecord], onset: int, *, repeats: bool, sure: bool
) -> Revival | None:
    """What to do after `streak` steps in a row without a finite one, or None to continue.

    Where a rollback might lose trained steps without any gain, it waits for the step at which the
    run would end: then nothing can be lost. This is so if the data cannot be repeated, or if an
    earlier place of this run did not change by all revivals, which is how bad data look.

    Args:
        streak: number of steps in a row without a finite one, up to the newest.
        rollbacks: all rollbacks of the run.
        onset: the last step that was trained.
        repeats: whether the run can repeat its steps with the same data.
        sure: whether earlier weights are known to give a finite loss on the newest batch.

    Returns:
        The next revival that this place has not had. None if it is too early for a revival, or too
        late: after three revivals the run ends.
    """
    revivals = [each for each in rollbacks if each.order.changes.revival]
    gave_up_before = any(each.order.changes.revival == Revival.UNDO for each in revivals)
    due = IN_A_ROW
    if sure or (repeats and not gave_up_before):
        due = STEPS_TO_REVIVE
    here = revivals_at(onset, revivals)
    if streak != due or len(here) == len(Revival):
        return None
    return Revival(len(here) + 1)


def revivals_at(onset: int, rollbacks: Sequence[RollbackRecord]) -> list[RollbackRecord]:
    """The revivals so far for a dead run that was last trained at step `onset`, oldest first.

    A revival is for this place if the run was rolled back at `onset` or later: it has repeated
    the step, and has died again no later.
    """
    return [each for each in rollbacks if each.order.changes.revival and onset <= each.step]


class DeadRun:
    """Notices a dead run, and orders the next revival.

    A run is dead if no step has a finite gradient any more although the weights are finite. Each of
    its steps is skipped, so without this class the run would continue to the end of the data and
    train nothing.

    Args:
        run: the parts of the run. This class uses more than eight of them, also `recovery`, which
            is made later.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.trained_rates = TrainedRates(run.monitor.state)
        """The rates that the damaging step may have had."""

    def revive(self, result: StepResult) -> RollbackRecord | None:
        """Rolls back a run in which no step is finite any more although the weights are finite.

        The module's docstring says when and how. Collective at the steps at which a revival may be
        due, and only there.

        Args:
            result: the newest step that was read.

        Returns:
            The rollback, or None without one.
        """
        monitor = self.run.monitor
        streak = monitor.state.nonfinite_streak or 0
        if streak not in (STEPS_TO_REVIVE, IN_A_ROW):
            return None
        policy, ledger = self.run.policy, self.run.ledger
        if not (policy.rolls_back and policy.rollback.confirm):
            return None  # only the policy's own rules decide
        if monitor.state.never_finite or monitor.nonfinite_record is None:
            return None  # a run without any finite step has nothing to go back to
        if not self.run.nonfinite_recovery.weights_are_finite():
            return None
        onset = max(ledger.first_consecutive(result.index) - 1, 0)
        is_sound = self._earlier_weights_are_sound(result, onset)
        if is_sound is False:
            return None  # the data
        # What the comparisons have found is surer, and a run without finite steps cannot recover.
        suspicion = self.run.comparisons.suspicion.verdict_without_waiting(result.index)
        if suspicion is not None:
            better = self.run.better_weights.carry_out(suspicion)
            if better is not None:
                return better
        loaders = self.run.loaders
        repeats = loaders.can_rewind
        if loaders.last_trained is None and self.run.recovery.counts_steps:
            repeats = True  # a loop over `steps`, which asks for the number of each step
        revival = next_revival(
            streak, ledger.in_force, onset, repeats=repeats, sure=is_sound is True
        )
        if revival is None:
            return None
        return self.run.recovery.roll_back(self._order_to_revive(result, onset, revival))

    def _earlier_weights_are_sound(self, result: StepResult, onset: int) -> bool | None:
        """Whether weights from before `onset` have a finite loss on the batch of a step.

        If not, the batch is bad and not the weights. None if it is not known, as without `loss_fn`.
        Collective.
        """
        comparisons = self.run.comparisons
        earlier = [each for each in comparisons.anchors if each.step <= onset]
        if not comparisons.is_enabled or not earlier or not result.contents:
            return None
        batch = TrainedStep(result.index, result.contents)
        losses = comparisons.loss_function.losses([batch], earlier[-1].weights, [math.nan])
        if losses is None:
            return None
        _, of_earlier = losses
        return math.isfinite(of_earlier[0])

    def _order_to_revive(self, result: StepResult, onset: int, revival: Revival) -> Order:
        """The order to bring back a dead run that was last trained at step `onset`."""
        state = self.run.monitor.state
        streak = state.nonfinite_streak or 0
        order = Order(
            index=result.index,
            onset=onset,
            first_alarm_of_cause=result.index - streak + 1,
            reason=OrderReason.DEAD_RUN,
            cause=int(result.records[0].cause),
            # Only the first revival may restore a checkpoint on probation. A later revival, and one
            # at `IN_A_ROW`, which can lose no trained step, takes a known-good checkpoint.
            sound_until_onset=revival == Revival.REPEAT and streak == STEPS_TO_REVIVE,
            changes=RepeatChanges(revival=revival),
        )
        if revival == Revival.LIMIT_RATE and self.run.policy.may_limit_lr:
            rates = broadcast(self.run.ranks, dict(state.rates))
            states = lr_states(self.run.driver.engines())
            return order.with_changes(lr_at_fault=rates, lr_states=states)
        if revival == Revival.UNDO:
            limited = revivals_at(onset, self.run.ledger.in_force)[-1]
            return order.with_changes(lr_states=limited.order.changes.lr_states)
        return order


class TrainedRates:
    """The highest learning rates in force at the trained steps since the last start or rollback.

    The rate at the newest step says little: the program may have lowered it since the damage. The
    second revival limits the learning rate by these rates.
    """

    def __init__(self, state: MonitorState) -> None:
        """Keeps the rates in `state.rates`, which a rollback clears."""
        self._state = state

    def add(self, records: Sequence[StepRecord]) -> None:
        """Adds the rates of one step.

        Args:
            records: the records of the step. Updates that have trained nothing do not count.
        """
        for record in records:
            rate = record.trained_rate
            if rate is not None:
                self._raise(record.engine, rate)

    def add_rates(self, rates: Rates) -> None:
        """Adds rates in force, by engine. Not every record has the rate of its step.

        Args:
            rates: engine name -> learning rate, or None where it is unknown.
        """
        for name, rate in rates.items():
            if rate is not None:
                self._raise(name, rate)

    def _raise(self, name: str, rate: float) -> None:
        """Keeps the rate of an engine if it is the highest so far."""
        self._state.rates[name] = max(rate, self._state.rates.get(name, 0.0))
