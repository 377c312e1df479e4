"""Says whether a run whose loop has ended by itself is complete, or what is missing in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healcore.console import counted, first_of
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
    progress, state = run.progress, run.loop.state
    if state.is_complete:
        return None
    step, taken = progress.step, progress.steps_taken
    advice = f"Write `{_RECOMMENDED_LOOPS[run.driver.framework]}`"
    if taken and run.loop.unseen_steps is not None:
        # The position in the data after these steps is unknown: a start from the last state would
        # train the same batches again.
        earlier = run.way_back.before_next_start(step - 1)
        if earlier is None:
            start = step
        else:
            start = earlier
        why = "the loop took its steps without the Healer"
        return IncompleteRun(
            f"healcore: {why}, which could not save between them, roll back or stop. {advice}, or "
            f"call healer.after_step() after each step. The next start resumes from checkpoint "
            f"{start}",
            why,
        )
    unread = len(run.step_batches.pending_ids)
    if not taken and (step == 0 or (unread and not state.break_place)):
        return IncompleteRun(
            "healcore: the loop has ended, and the Healer has seen no step of an optimizer in the "
            f"state ({counted(unread, 'batch', 'batches')} read). "
            f"{run.driver.no_step_reason() or advice}. The next start begins at step {step}",
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
            f"healcore: the run was resumed at step {step}, and the loop has ended "
            "without a step. A loop of epochs begins with `for epoch in healer.epochs(n)`, and "
            "reads healer.batches(loader, epoch=epoch). If the run has no more steps, an empty "
            "directory begins a new run",
            "the loop has taken no step since the restart",
        )
    return None


def stop_if_not_trained(run: Run, *, judges_weights: bool = True) -> None:
    """Stops a run that has trained nothing, or not most of its data, or ends with NaN weights.

    The code after the loop may export the weights. So the judgement comes when a loop of one rank
    ends (`Loop`), and for every run at the end of the block. A run that was not trained on most of
    its data has its last state on disk: nothing but the skips is wrong with its weights.

    Args:
        run: the run. All its steps are read.
        judges_weights: whether the weights are the weights of the run.

    Raises:
        RunStopped: the run has not trained.
    """
    run.nonfinite_recovery.stop_if_never_finite(at_end=True)
    if run.policy.observes:
        return
    judges = judges_weights and run.policy.rollback.nonfinite_state == "rollback"
    if judges and not run.nonfinite_recovery.weights_are_finite():
        found = run.saver.nonfinite_in_state()
        if found:
            run.stopping.stop(f"{first_of(found)} became NaN or Inf at the end")
    not_taken, skipped = run.journal.not_taken, run.step_batches.skipped_steps
    total = run.progress.step + skipped
    if 2 * (not_taken + skipped) <= total:
        return
    if skipped:
        undone = f", and {skipped} were undone and their batches skipped"
    else:
        undone = ""
    # Before the stop, which marks the newest record: the next start begins before the skips.
    run.saver.save_last(completed=True, after_loop=True)
    run.stopping.stop(
        "the data have ended, and the run has not trained on most of them: of "
        f"{total} steps, {not_taken} were skipped{undone}",
        onset=next(iter(run.journal.unhealthy), run.progress.step),
    )


def report_recoveries(run: Run) -> None:
    """Reports, at the end of a run, accepted damage of which nothing is left.

    A program that makes its loss worse on purpose, for example by a restart of its rate, does so in
    each repeat. If the mean loss is no higher at the end than before, nothing is damaged.

    Args:
        run: the parts of the run.
    """
    loss = run.witness.recent.mean_loss()
    for verdict in [*run.log.history.of("assessment")]:
        onset, level = verdict.onset, verdict.loss_before
        if onset in run.ledger.damage_left and level is not None and loss <= level:
            run.ledger.damage_left.remove(onset)
            why = (
                f"the mean loss is {loss:.4g} at the end, and was {level:.4g} before; probably "
                "your program made the change itself, for example by a restart of its rate"
            )
            run.log.assessment(run.progress.step - 1, onset, "recovered", why=why)
            run.log.info(f"nothing is left of the damage since step {onset}: {why}")
