"""The loops over numbers that a program gets from the Healer: numbers of epochs, or of steps.

    loop_over_epochs    yields the number of an epoch; the program reads its batches in the body
    loop_over_steps     yields the number of a step; the program reads batches of its own

Both are generators, so that nothing happens before the first `next`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from healcore.runtime.run.ending.exits import IncompleteRun
from healcore.runtime.run.loop import MAX_ITERATIONS

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


def loop_over_epochs(run: Run, total: int) -> Iterator[int]:
    """Yields the numbers of the epochs; the behaviour of `Healer.epochs`.

    If the first epoch is one step without `batches`, the rest of the loop counts steps as
    `loop_over_steps` does, so that each epoch gets the work between two steps.

    Args:
        run: the parts of the run.
        total: number of the epoch at which the loop ends.

    Raises:
        RunStopped, Terminated, EndRequested: as in `Healer.batches`, if epochs are steps.
    """
    loaders, state = run.loaders, run.loop.state
    loaders.epoch_loop.total_epochs = total
    if state.is_complete:
        run.data_state.restore()  # the program draws on as after the end of the run
        loaders.end_epochs()
        state.reached_end = True
        return
    epoch = loaders.epoch_loop.next_epoch
    try:
        while epoch < total:
            run.data_state.begin_pass()
            if _steps_are_epochs(run, epoch):
                state.step_is_epoch = True
                for number in loop_over_steps(run, total):
                    loaders.epoch_loop.next_epoch = number
                    yield number
                return
            loaders.begin_epoch(epoch)
            state.in_body = True
            yield epoch
            state.in_body = False
            if loaders.epoch_loop.returns_to is not None:
                # The line of the rollback has named this epoch. The program's code after the pass
                # has run with the restored state (an evaluation, the step of a scheduler), so the
                # state is restored once more.
                run.way_back.restore_again(run.progress.step)
                epoch, loaders.epoch_loop.returns_to = loaders.epoch_loop.returns_to, None
            else:
                epoch += 1
                loaders.epoch_loop.next_epoch = epoch
                run.saver.keep_random_states()
                run.saver.keep_weight_sample()
        run.loop.judge_at_end()
        state.reached_end = True
    finally:
        loaders.end_epochs()


def _steps_are_epochs(run: Run, epoch: int) -> bool:
    """Whether each earlier epoch of a loop over epochs was one step, without a loader.

    Args:
        run: the parts of the run.
        epoch: the epoch that begins. In epoch 0 of a new run nothing is known yet.
    """
    if not run.loaders.is_empty or not (epoch > 0 or run.progress.resumed_here):
        return False
    # If the code after the step of epoch 0 raises, the checkpoint has step 1, epoch 0.
    return run.progress.step + run.driver.pending_steps() == max(epoch, 1)


def loop_over_steps(run: Run, total: int) -> Iterator[int]:
    """Yields the numbers of the steps; the behaviour of `Healer.steps`.

    An iteration without a step gets the same number again, for example to fill a replay buffer. But
    a program whose steps the Healer does not see would never end. So their number has a limit.

    Args:
        run: the parts of the run.
        total: number of optimizer steps at which the loop ends.

    Raises:
        IncompleteRun: too many iterations took no step.
        RunStopped, Terminated, EndRequested: as in `Healer.batches`.
    """
    loop, progress, state = run.loop, run.progress, run.loop.state
    waited, allowed, before = 0, max(MAX_ITERATIONS, total), -1
    run.data_state.is_restored = False  # for the data that the loop draws
    run.recovery.counts_steps = True
    if state.is_complete:
        run.data_state.restore()
        run.loaders.pass_over_completed()
        state.reached_end = True
        return
    while True:
        rollback = loop.after_step()
        if before >= 0 and progress.step == before and rollback is None:
            waited += 1
        else:
            waited, allowed = 0, allowed if before < 0 else MAX_ITERATIONS
        before = progress.step
        if waited > allowed:
            reason = run.driver.no_step_reason()
            reason = reason or "the state needs the optimizer whose step() the loop calls"
            raise IncompleteRun(
                f"healcore: step {before} was not taken in {allowed} iterations of healer.steps: "
                f"{reason}. Take a longer warm-up before the loop; a loop with fewer steps calls "
                "healer.after_step()"
            )
        if progress.step < total:
            state.yielded_step, state.in_body = progress.step, True
            yield progress.step
            state.yielded_step, state.in_body = None, False
        elif loop.after_step(last=True) is None:
            state.reached_end = True
            return
        # Otherwise the last steps were rolled back, and the loop repeats them.
