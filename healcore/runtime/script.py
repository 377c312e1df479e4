"""`start`: a run without a `with` block, for scripts that end with the file.

A block ends where its indentation ends. Without one, a run ends with its loop, and these events end
it for good:

    event                                                  the run
    ----------------------------------------------------   -----------------------------------------
    `RunStopped`, a signal, a stop file, in its loop       is closed at once, as by a block
    `healer.close()`                                       is closed as complete
    an uncaught exception (`sys.excepthook`)               is closed as by a block
    another `start` in the same thread                     is closed as at the end of the process
    the end of the process, within a loop (`break`,        is closed early: the next start resumes
    `sys.exit()`)
    the end of the process, anywhere else                  is closed as complete

The state is saved where a loop ends or is left. What the program does with the state afterwards
(evaluates averaged weights, exports, begins another fold) is not saved. Only `healer.close()` saves
what is there when the program calls it.

In an interactive session (IPython, a notebook, `python -i`) an exception of a cell ends nothing:
the run stays open. The next `start` closes it, and for the same store resumes from it.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Unpack

from healcore.core.errors import HealcoreError
from healcore.policy import PolicyLike
from healcore.runtime.healer import Healer, Item, State
from healcore.runtime.run.ending.end import end_run
from healcore.runtime.run.ending.exits import EndRequested, exit_for
from healcore.runtime.run.progress import LoopPhase
from healcore.runtime.run.run import Run
from healcore.runtime.run_options import HealerOptions

_previous_hook: Callable[..., object] | None = None
"""What `sys.excepthook` was before the first `start`, or None before it."""


class ScriptHealer(Healer[State]):
    """A Healer without a block: what the end of a block does, the end of a loop does."""

    opened_at_end: int | None = None
    """Number of runs of this process when the newest loop of this run had ended by itself, or
    None."""

    def after_step(self, *, last: bool = False) -> bool:
        """See `Healer.after_step`."""
        rolled_back = super().after_step(last=last)
        if last and not rolled_back:
            self._end_loop()
        return rolled_back

    def _until_end(self, loop: Iterator[Item]) -> Iterator[Item]:
        """Yields what a loop yields, and saves the state where the loop ends or is left.

        An exception of healcore that ends programs ends the run here.
        """
        self.opened_at_end = None
        try:
            yield from loop
        except GeneratorExit:  # a `break`, or an exception in the body
            if self.is_open:
                _save_at_loop_end(self._run, left=True)
            raise
        except SystemExit as error:
            if isinstance(error, HealcoreError) and not hasattr(sys, "ps1"):
                self.close(error)
            raise
        self._end_loop()

    def _end_loop(self) -> None:
        """A loop has ended by itself. Unless it runs in the body of another loop, the run ends."""
        if self.is_open:
            _save_at_loop_end(self._run, left=False)
            self.opened_at_end = Run.opened


_started: list[tuple[ScriptHealer[Any], threading.Thread]] = []
"""The Healers that are not known to be closed, oldest first, with the threads that train them."""


def _save_at_loop_end(run: Run, *, left: bool) -> None:
    """Saves the state at the end of the program's outermost loop.

    If the program counts its epochs itself, each pass may be the last one, so from the second pass
    on the time of these saves is limited as the time of regular saves is.

    Args:
        run: the run, which is open.
        left: whether the loop was left within its body, by a `break` or an exception. Several ranks
            then save nothing: perhaps only some of them have left their loop.
    """
    state = run.progress
    run.hang_guard.rest()
    in_outer_loop = run.loaders.epoch_loop.can_return or state.yielded_step is not None
    is_done = state.phase in (LoopPhase.AT_REST, LoopPhase.COMPLETED) or not state.steps_taken
    if in_outer_loop or is_done or not run.store.durable:
        return
    if not left:
        is_one_of_several = run.loaders.passes > 1 and not state.reached_end
        if not (state.in_body or (is_one_of_several and run.schedule.saves_are_slow)):
            run.saver.save_last(completed=True)
            state.phase = LoopPhase.AT_REST
    elif run.ranks.world == 1 and run.loop.count_last_step():
        try:
            if not run.saver.save_emergency(""):
                state.phase = LoopPhase.AT_REST
        except Exception as problem:  # the exception of the body is the one to be seen
            run.loop.warn(f"no checkpoint was saved at the end of the loop: {problem}")


def start(
    policy: PolicyLike = "default", *, state: State, **options: Unpack[HealerOptions]
) -> Healer[State]:
    """Opens a Healer without a block: no `with`, no indentation.

        healer = healcore.start(
            state={"model": model, "optimizer": optimizer}, store="checkpoints", loss_fn=loss_fn
        )
        for batch in healer.batches(loader):
            healer.loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    The run ends with its loop, and the state at the end of the loop is saved. What your program
    does with the model afterwards is not saved: it may load averaged weights, prune, or begin
    another fold. Another loop continues the run. `healer.close()` saves what is there when you call
    it, and completes the run.

    An uncaught exception is treated as one that leaves the block of `with healcore.Healer(...)`. A
    loop that is left by `break` or `sys.exit()` counts as an early end, which the next start
    resumes. Call `healer.close()` if the run is complete then, after a loop with a condition of
    your own (`while`), and before you destroy a process group.

    In a notebook the exception of a cell does not end the process. The run stays open, and you can
    go on with the loop. `start` closes the open run of its thread first: two runs at the same time
    need `with healcore.Healer(...)`.

    Args:
        policy: as for `healcore.Healer`.
        state: as for `healcore.Healer`.
        **options: the other arguments of `healcore.Healer`.

    Returns:
        The open Healer.

    Raises:
        Exception: as `healcore.Healer` and its `with` statement.
    """
    healer = ScriptHealer(policy, state=state, **options)
    thread = threading.current_thread()
    for other in [each for each in _started if each[1] is thread]:
        _close(other[0])
        _started.remove(other)
    _install_hooks()  # first: the main thread may end while a side thread opens its run
    healer._open()
    _started.append((healer, thread))
    return healer


def _close(healer: ScriptHealer[Any], raised: BaseException | None = None) -> int:
    """Closes a run unless it is closed. Returns the exit status, and prints an error of it.

    Args:
        healer: a Healer that `start` has opened.
        raised: the uncaught exception of the program, or None. If another run was opened after the
            loop of this one had ended, it concerns that run.
    """
    run, opened = healer._run, healer.opened_at_end
    if run.end is not None or os.getpid() != run.pid:
        return 0
    is_followed = opened is not None and Run.opened > opened
    error = run.stopping.stopped
    if error is None and not is_followed:
        error = raised
    if error is None and not is_followed and run.end_requests.signal_number is not None:
        error = exit_for(run.end_requests.signal_number)
    if error is None and run.progress.left_early:
        why = "a program that has left its loop early"
        if run.end_requests.stop_file_found:
            why = run.end_requests.stop_reason
        error = EndRequested(why)
    replacement = end_run(run, error, by="exit").error
    if replacement is None or replacement is error:
        return 0
    print(replacement, file=sys.stderr)
    return 1


def _install_hooks() -> None:
    """Makes Python call `_on_uncaught` and `_on_exit`, once for all runs of the process."""
    global _previous_hook
    if _previous_hook is not None:
        return
    _previous_hook = sys.excepthook
    sys.excepthook = _on_uncaught
    # Before the thread pools end, which a save needs: the handlers of `atexit` come too late.
    register = getattr(threading, "_register_atexit", atexit.register)
    with suppress(RuntimeError):  # the main thread has ended already, and waits for this one
        register(_on_exit)


def _on_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Closes the runs as their blocks would do, then prints the exception as before."""
    if not hasattr(sys, "ps1"):
        for healer, thread in reversed(_started):
            if thread is threading.current_thread():
                _close(healer, error)
    assert _previous_hook is not None
    _previous_hook(kind, error, trace)


def _on_exit() -> None:
    """Closes the runs that are still open. Sets the exit status if a run is incomplete."""
    status = 0
    for healer, thread in reversed(_started):
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()  # Python waits for it in any case, but only later
        status = _close(healer) or status
    if status:
        # Python has chosen the status already. The other handlers run first.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
