"""What a restore does where the program has changed the structure of its model since the save.

A checkpoint from before the change does not fit the live model any more:

    a rollback     `steps_after_change`    newer checkpoints, which fit, are tried
                   `restore_common`        if none fits: only the weights that both models have
                   `forget_changes`        a change in undone steps will happen again
    a start        `advice_for`            how the program makes the change before the Healer opens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from healcore.runtime.run.checkpoints.saver import SaveReason
from healcore.runtime.run.engine_states import engines_after_rollback
from healcore.runtime.run.orders import Order, RollbackRecord
from healcore.runtime.run.record.run_record import RunRecord
from healcore.runtime.store.checkpoints import CheckpointDamaged, CheckpointNotFound, StateMismatch

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

MODEL_CHANGED_SINCE = "the program has changed the structure of its model since"
"""Reason of a rollback that restores weights, and not the place in the run."""


def steps_after_change(run: Run, order: Order, change: int) -> list[int]:
    """Steps of the finite checkpoints from after a change of the model, the best first.

    The newest one up to the onset; then, as a last resort, the oldest one after the onset, whose
    arrays are finite at least. Checkpoints that were tried for the same trouble come last, oldest
    first: nothing older fits, and the budget of rollbacks ends the trials.

    Args:
        run: the parts of the run.
        order: the order of the rollback.
        change: step of a checkpoint from before the change. Only newer ones are returned.
    """
    past = run.ledger.same_trouble(order.onset, run.policy.rollback.region)
    past_targets = {each.checkpoint for each in past}
    before, after, tried = [], [], []
    for each in run.stored_checkpoints.listed():
        if not each.is_usable or each.step <= change:
            continue
        if each.step in past_targets:
            tried.append(each.step)
        elif each.step <= order.onset:
            before.append(each.step)
        else:
            after.append(each.step)
    return [*sorted(before, reverse=True), *sorted(after), *sorted(tried)]


def restore_common(
    run: Run, order: Order, steps: Sequence[int], mismatch: StateMismatch, lr_scale: float
) -> RollbackRecord:
    """Restores what a checkpoint has in common with a model whose structure has changed since.

    The run keeps its place. At an earlier place the program would change its model once more, which
    may do harm or raise. So only weights and moments go back.

    Args:
        run: the parts of the run.
        order: the order of the rollback.
        steps: steps of the checkpoints to try, the best first.
        mismatch: why the best checkpoint that was tried does not fit.
        lr_scale: the lowest learning-rate multiplier now, for the record.

    Returns:
        The rollback. It repeats no steps: `weights_from` is set.

    Raises:
        StateMismatch: no checkpoint has enough in common with the model, or there are several
            ranks.
    """
    driver, saver, step = run.driver, run.saver, run.progress.step
    if run.ranks.world > 1:
        raise mismatch
    live = driver.engines()
    found, misfit = None, None
    for each in steps:
        try:
            driver.load_common(run.store.restore_common(each, saver.items()))
        except StateMismatch as error:
            misfit = misfit or replace(error, step=each)  # the reason of the best one is reported
        except (CheckpointNotFound, CheckpointDamaged):
            continue
        else:
            found = each
            break
    if found is None:
        raise misfit or mismatch
    driver.load(None, engines_after_rollback(run.policy.engine, live, {}))
    done = RollbackRecord(
        order=order,
        number=len(run.ledger.rollbacks) + 1,
        step=step,
        continues_at=step,
        weights_from=found,
        lost=step - found,
        why_lost=MODEL_CHANGED_SINCE,
        rewind_obstacle=MODEL_CHANGED_SINCE,
        lr_scale_before=lr_scale,
    )
    run.ledger.on_rollback(done, None)
    run.comparisons.on_rollback(step)
    run.monitor.state.on_rollback(step)
    run.comparisons.on_structure_change()
    saver.begin_attempt(step)
    saver.save_state_as(step, SaveReason.ROLLBACK)
    return done


def forget_changes(run: Run, *, since: int) -> None:
    """Forgets the program's changes of the model in steps that are undone.

    Args:
        run: the parts of the run.
        since: step of the restored checkpoint.
    """
    record = run.record
    record.changes = [each for each in record.changes if each.step < since]
    run.loaders.epoch_loop.changed_in = max((each.epoch for each in record.changes), default=None)


def advice_for(newest: RunRecord | None) -> str:
    """What to do about a checkpoint that does not fit, if the program has changed its model.

    Args:
        newest: the newest record in the store, or None.

    Returns:
        Sentences for the error message, or an empty string without a change.
    """
    if newest is None or not newest.changes:
        return ""
    which = ", ".join(f"at step {each.step} (epoch {each.epoch})" for each in newest.changes[-3:])
    return (
        f"The program has changed the structure of its model while it trained, {which}. Make the "
        "same changes before `with Healer(...)`, and not again in the loop; "
        'docs/data-and-resume.md shows it under "A model that changes while it trains"'
    )
