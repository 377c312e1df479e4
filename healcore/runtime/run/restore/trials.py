"""The trials for one trouble: what was in force before them, and a start that undoes them.

A rollback tries a remedy. If the trouble stops the run all the same, the remedies have failed, and
the program needs a repair. The next start then resumes as if they had not been tried:

    a rollback       `trials_with`               notes what was in force before the first trial
    a stop           `NextStart`                 marks the trials as failed
    the next start   `failed_trials`             finds them in the newest record
                     `without_failed_trials`     a checkpoint as it would be without them
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from healcore.runtime.driver import Engines
from healcore.runtime.run.engine_states import limits_and_budgets, with_limits_and_budgets
from healcore.runtime.run.orders import Order
from healcore.runtime.run.record.ledger import Ledger
from healcore.runtime.run.record.run_record import RunRecord, Trials
from healcore.runtime.run.restore.stored import SavedCheckpoint

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


def trials_with(run: Run, order: Order, live: Engines, saved: SavedCheckpoint) -> Trials:
    """The trials for the trouble of an order, including the rollback that is under way.

    Call it before the rollback changes loaders, ledger and what is held.

    Args:
        run: the parts of the run.
        order: the order of the rollback.
        live: the engine states before the rollback.
        saved: the checkpoint that is restored.

    Returns:
        What was in force before the first of these trials.
    """
    record, ledger = run.record, run.ledger
    trials = record.trials_for(order.onset, run.policy.rollback.probation)
    if trials is not None:
        return replace(trials, oldest=min(trials.oldest, saved.step))
    # The live multiplier may be cut already, by the step that has ordered the rollback. But a
    # checkpoint from before an earlier rollback does not know the limits of that rollback.
    engines = live
    known = None  # number of rollbacks that the checkpoint knows
    if saved.record is not None:
        known = len(saved.record.ledger.rollbacks)
    if known == len(ledger.rollbacks) and saved.engines:
        engines = saved.engines
    return in_force_now(run, oldest=saved.step, engines=limits_and_budgets(engines))


def in_force_now(run: Run, *, oldest: int, engines: Mapping[str, dict[str, Any]]) -> Trials:
    """What is in force now, before any trial.

    Args:
        run: the parts of the run.
        oldest: step of the checkpoint from which a start resumes to undo the trials.
        engines: engine name -> its limits and budgets before the trials, for this start.
    """
    ledger = run.ledger
    return Trials(
        first=len(ledger.rollbacks),
        oldest=oldest,
        engines=dict(engines),
        skipped=run.loaders.skipped_by_loader(),
        held=run.holding.held,
        silent_until=run.comparisons.state.silent_until,
        accepted=ledger.accepted,
        accepted_until=ledger.accepted_until,
    )


def failed_trials(newest: RunRecord | None) -> Trials | None:
    """The trials that have not kept the run from a stop, which a start undoes; or None.

    Args:
        newest: the newest record in the store, or None.
    """
    if newest is None or newest.trials is None or not newest.trials.failed:
        return None
    return newest.trials


def without_failed_trials(
    saved: SavedCheckpoint, newest: RunRecord | None
) -> tuple[RunRecord, Engines]:
    """The record and the engine states of a checkpoint, without the changes by failed trials.

    Args:
        saved: the checkpoint.
        newest: the newest record in the store, or None. If it has no failed trials, the record and
            the states are those of the checkpoint.

    Returns:
        The record, or a new record if the checkpoint has none; and the engine states.
    """
    own = saved.record or RunRecord(first_step=saved.step, step=saved.step)
    trials = failed_trials(newest)
    if newest is None or trials is None:
        return own, saved.engines
    engines = with_limits_and_budgets(saved.engines, trials.engines)
    return _without_trials(own, newest.ledger, trials), engines


def _without_trials(own: RunRecord, ledger: Ledger, trials: Trials) -> RunRecord:
    """The record of a checkpoint without the changes by trials.

    Args:
        own: the record.
        ledger: the newest ledger of the run, which counts all rollbacks.
        trials: what was in force before the trials.
    """
    comparisons = own.comparisons
    if comparisons is not None:
        ranges = replace(comparisons.ranges, held=trials.held)
        comparisons = replace(comparisons, ranges=ranges, silent_until=trials.silent_until)
    return replace(
        own,
        ledger=ledger.without_trials(trials, own.ledger),
        skipped=trials.skipped,
        comparisons=comparisons,
    )
