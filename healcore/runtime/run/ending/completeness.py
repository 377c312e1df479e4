"""Says whether a run whose loop has ended by itself is complete, or what is missing in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healcore.console import counted, first_of
from healcore.runtime.reporting.diagnosis import recovered_text
from healcore.runtime.reporting.nonfinite_steps import likely_cause_text
from healcore.runtime.run.ending.exits import IncompleteRun, RunStopped

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

_RECOMMENDED_LOOPS = {
    "jax": "for batch in healer.batches(loader): state = healer.update(step(healer.state, batch))",
    "torch": "for batch in healer.batches(loader): ...; loss.backward(); optimizer.step()",
}
"""Framework -> recommended loop."""


def incomplete_run_error(run: Run, *, judges_weights: bool = True) -> BaseException | None:
    """The exception for a loop that has ended by itself with an incomplete run, or None.

    A program that ends with status 0 is taken for trained. So a loop that has trained nothing, or
    weights that are not finite, end with status 1 and say what to write instead.

    Args:
        run: the parts of the run. Its last steps have been read.
        judges_weights: whether the weights are the weights of the run, and not what the program has
            made of them after its loop.

    Returns:
        The first of these exceptions that applies, or None for a complete run:

            the loop took its steps without the Healer                      IncompleteRun
            the Healer has seen no step of an optimizer in the state        IncompleteRun
            the weights are NaN or Inf, or most of the data was skipped     RunStopped
            a resumed run has ended without a step, and not at its end      IncompleteRun
    """
    if run.loop.state.is_complete:
        return None
    progress, state = run.progress, run.loop.state
    loop_text = _RECOMMENDED_LOOPS[run.driver.framework]
    if progress.steps_taken and not state.was_used:
        return IncompleteRun(
            "healcore: the loop took its steps without the Healer, which could not save between "
            f"them, roll back or stop. Write `{loop_text}`, or call healer.after_step() after each "
            f"step. The last state is saved as checkpoint {progress.step}. "
            f"{_next_start_of_unseen(run)}",
            "the loop took its steps without the Healer",
        )
    unread = len(run.step_batches.pending_ids)
    has_new_batches = bool(unread) and not state.break_place
    if not progress.steps_taken and (progress.step == 0 or has_new_batches):
        kind, advice = "of an optimizer in the state", f"Write `{loop_text}`"
        reason = run.driver.no_step_reason()
        if reason:
            kind, advice = "with a gradient", reason
        return IncompleteRun(
            f"healcore: the loop has ended, and the Healer has seen no step {kind} "
            f"({counted(unread, 'batch', 'batches')} read). {advice}. The next start begins at "
            f"step {progress.step}",
            "the Healer has seen no step",
        )
    try:
        stop_if_not_trained(run, judges_weights=judges_weights)
    except RunStopped as stop:
        return stop
    has_read_all = run.loaders.passes > 0 and run.loaders.is_caught_up
    is_at_end = state.reached_end or progress.had_completed or has_read_all
    if progress.resumed_here and not (is_at_end or state.break_place or run.loop.has_trainer):
        return IncompleteRun(
            f"healcore: the run was resumed at step {progress.step}, and the loop has ended "
            "without a step. A loop of epochs begins with `for epoch in healer.epochs(n)`, and "
            "reads healer.batches(loader, epoch=epoch). If the run has no more steps, an empty "
            "directory begins a new run",
            "the loop has taken no step since the restart",
        )
    return None


def _next_start_of_unseen(run: Run) -> str:
    """Makes the next start resume from before the unseen steps. Returns the sentence about it.

    The position in the data after these steps is unknown, so a start from the last state would
    train the same batches again.
    """
    step = run.way_back.repeat_from(before=run.progress.step)
    if step is None:
        return f"The next start resumes from checkpoint {run.progress.step}"
    return f"The next start resumes from checkpoint {step}, before these steps"


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
    loss = run.witness.recent.mean_loss()
    before: dict[int, float] = {}
    for onset in run.ledger.damage_left:
        level = run.log.history.losses_before.get(onset)
        if level is not None and loss <= level:
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
