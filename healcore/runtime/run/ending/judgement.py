"""Judges a run at the end of its data: has it trained, and what is left of accepted damage?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from healcore.console import first_of
from healcore.runtime.reporting.diagnosis import recovered_text
from healcore.runtime.reporting.nonfinite_steps import likely_cause_text

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


def stop_if_not_trained(run: Run, *, judges_weights: bool = True) -> None:
    """Stops a run that has trained nothing, or not most of its data, or ends with NaN weights.

    A program that ends with status 0 is taken for trained, and the code after its loop may export
    the weights. So the judgement comes when a loop of one rank ends (`Loop`), and for every run at
    the end of the block. A run that was not trained on most of its data has its last state on disk:
    nothing but the skips is wrong with its weights.

    Args:
        run: the run. All its steps are read.
        judges_weights: whether the weights are the weights of the run.

    Raises:
        RunStopped: the run has not trained.
    """
    not_taken = run.journal.not_taken
    skipped = run.step_batches.skipped_steps
    total = run.progress.step + skipped
    run.nonfinite_recovery.stop_if_never_finite(at_end=True)
    judges = run.policy.rollback.nonfinite_state == "rollback" and not run.policy.observes
    if judges_weights and judges and not run.nonfinite_recovery.weights_are_finite():
        found = run.saver.nonfinite_in_state()
        if found:
            run.stopping.stop(f"{first_of(found)} became NaN or Inf at the end")
    if run.policy.observes or 2 * (not_taken + skipped) <= total:
        return
    undone = ""
    if skipped:
        undone = f", and {skipped} were undone and their batches skipped"
    # Before the stop, which marks the newest record: the next start begins before the skips.
    run.saver.save_last(completed=True, after_loop=True)
    run.stopping.stop(
        "the data have ended, and the run has not trained on most of them: of "
        f"{total} steps, {not_taken} were skipped{undone}"
        f"{likely_cause_text(run.monitor.nonfinite_record)}",
        repeats_skips=True,
    )


def report_recoveries(run: Run) -> None:
    """Reports, at the end of a run, accepted damage of which nothing is left.

    A program that makes its loss worse on purpose, for example by a restart of its rate, does
    so in each repeat. If the mean loss is no higher at the end than before, nothing is damaged.

    Args:
        run: the parts of the run.
    """
    loss = run.comparisons.history.level.mean()
    before: dict[int, float] = {}
    for onset in run.ledger.damage_left:
        level = run.log.history.losses_before.get(onset)
        if loss is not None and level is not None and loss <= level:
            before[onset] = level
    if not before:
        return
    why = (
        f"the mean loss is {loss:.4g} at the end, and was {min(before.values()):.4g} or more "
        "before; probably your program made the change itself, for example by a restart of its "
        "rate"
    )
    for onset in before:
        run.ledger.damage_left.remove(onset)
        run.log.assessment(run.progress.step - 1, onset, "recovered", why=why)
    run.log.info(f"{recovered_text([*before])}: {why}")
