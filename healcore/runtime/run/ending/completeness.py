"""Says whether a run whose loop has ended by itself is complete, or what is missing in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healcore.console import counted
from healcore.runtime.run.ending.exits import IncompleteRun, RunStopped
from healcore.runtime.run.ending.judgement import stop_if_not_trained

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
    is_at_end = state.reached_end or progress.had_completed or run.loaders.has_repeated_all
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
