"""What a restore does where the program has changed the structure of its model since the save.

A checkpoint from before the change does not fit the live model any more:

    a rollback     `steps_after_change`    newer checkpoints, which fit, are tried
                   `restore_common`        if none fits: only the weights that both models have
                   `forget_changes`        a change in undone steps will happen again
    a start        `advice_for`            how the program makes the change before the Healer opens
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from healcore.runtime.run.record.run_record import RunRecord

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


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
