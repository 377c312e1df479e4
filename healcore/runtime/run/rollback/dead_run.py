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
   here on the run is as it was before the first attempt, and no more attempt is for this place.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from healcore.core.decision import StepRecord
from healcore.runtime.driver import Rates
from healcore.runtime.run.monitor_state import MonitorState
from healcore.runtime.run.orders import RollbackRecord
from healcore.runtime.story.diagnosis import IN_A_ROW

STEPS_TO_REVIVE = 20
"""Steps in a row without a finite one after which a run is brought back."""


class Attempt(IntEnum):
    """What a run changes when it is brought back, in this order. A checkpoint holds the value."""

    REPEAT = 1
    LIMIT_RATE = 2
    UNDO = 3


def next_attempt(
    streak: int, rollbacks: Sequence[RollbackRecord], onset: int, *, repeats: bool, sure: bool
) -> Attempt | None:
    """What to do after `streak` steps in a row without a finite one, or None to continue.

    Where a rollback might lose trained steps for nothing, it waits for the step at which the run
    would end: then nothing can be lost. This is so if the data cannot be repeated, or if an earlier
    place of this run did not change by all attempts, which is how bad data look.

    Args:
        streak: number of steps in a row without a finite one, up to the newest.
        rollbacks: all rollbacks of the run.
        onset: the last step that was trained.
        repeats: whether the run can repeat its steps with the same data.
        sure: whether earlier weights are known to give a finite loss on the newest batch.
    """
    attempts = [each for each in rollbacks if each.attempt]
    is_early = sure or (repeats and not any(each.attempt == Attempt.UNDO for each in attempts))
    here = attempts_at(onset, attempts)
    # Where the attempts have begun, they go on.
    due = STEPS_TO_REVIVE if is_early else IN_A_ROW
    if streak != due or len(here) == len(Attempt):
        return None
    return Attempt(len(here) + 1)


def attempts_at(onset: int, rollbacks: Sequence[RollbackRecord]) -> list[RollbackRecord]:
    """The attempts so far for a dead run that was last trained at step `onset`, oldest first."""
    return [each for each in rollbacks if each.attempt and onset <= each.step]


class TrainedRates:
    """The highest learning rates in force at the trained steps since the last start or rollback.

    The rate at the newest step says little: the program may have lowered it since the damage.
    """

    def __init__(self, state: MonitorState) -> None:
        """Keeps the rates in `state.rates`, which a rollback clears."""
        self._state = state

    def add(self, records: Sequence[StepRecord]) -> None:
        """Adds the rates of one step."""
        for record in records:
            rate = float(record.lr) * float(record.lr_scale)
            # A record has 0 or 1 for an unknown rate.
            if record.judged and not record.skip and record.lr not in (0.0, 1.0):
                self._raise(record.engine, rate)

    def add_rates(self, rates: Rates) -> None:
        """Adds rates in force, by engine. Not every record has the rate of its step."""
        for name, rate in rates.items():
            if rate is not None:
                self._raise(name, rate)

    def _raise(self, name: str, rate: float) -> None:
        self._state.rates[name] = max(rate, self._state.rates.get(name, 0.0))
