"""`start`: a run without a `with` block, for scripts that end with the file.

A block ends with the exception that leaves it. Without one, `start` finds out how the program ends:

- an uncaught exception, from `sys.excepthook`, is treated as an exception that leaves the block;
- `RunStopped`, a signal and the other exceptions of healcore that end a program are noted where
  they are made, because Python calls no hook for a `SystemExit`;
- a loop that was left in its body (a `break`, or `sys.exit()`) is an early end, which the next
  start resumes, unless the program has called `healer.close()`;
- anything else is the end of the block.

In an interactive session (IPython, a notebook, `python -i`) an exception of a cell ends nothing:
the run stays open. The next `start` for the same store closes it, and resumes from it.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Unpack

from healcore.policy import PolicyLike
from healcore.runtime.healer import Healer, State
from healcore.runtime.healer_options import HealerOptions
from healcore.runtime.run.ending import exits

_started: list[Healer[Any]] = []
"""The runs that `start` has opened and that are not closed, oldest first."""
_previous_hook: Callable[..., object] | None = None
"""What `sys.excepthook` was before the first `start`, or None before it."""


def start(
    policy: PolicyLike = "default", *, state: State, **options: Unpack[HealerOptions]
) -> Healer[State]:
    """Opens a Healer that the end of the process closes: no `with`, no indentation.

        healer = healcore.start(
            state={"model": model, "optimizer": optimizer}, store="checkpoints", loss_fn=loss_fn
        )
        for batch in healer.batches(loader):
            healer.loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    The end of the process closes it, or `healer.close()` before. An uncaught exception is treated
    as one that leaves the block of `with healcore.Healer(...)`. A loop that is left by `break` or
    `sys.exit()` counts as an early end, which the next start resumes. Call `healer.close()` if the
    run is complete then, and before you destroy a process group.

    In a notebook the exception of a cell does not end the process. The run stays open, and you can
    go on with the loop. `start` for the same store closes the open run first.

    Args:
        policy: as for `healcore.Healer`.
        state: as for `healcore.Healer`.
        **options: the other arguments of `healcore.Healer`.

    Returns:
        The open Healer.

    Raises:
        Exception: as `healcore.Healer` and its `with` statement.
    """
    healer = Healer(policy, state=state, **options)
    for other in _started:
        if _is_replaced_by(healer, other):
            _close(other, _early_end(other))
    healer._open()
    _install_hooks()
    _started.append(healer)
    return healer


def _is_replaced_by(new: Healer[Any], old: Healer[Any]) -> bool:
    """Whether an open run has to be closed before a new one begins."""
    same_store = new.store is not None and new.store == old.store
    return old.is_open and (same_store or hasattr(sys, "ps1"))


def _install_hooks() -> None:
    """Makes Python call `_on_uncaught` and `_on_exit`, once for all runs of the process."""
    global _previous_hook
    if _previous_hook is not None:
        return
    _previous_hook = sys.excepthook
    sys.excepthook = _on_uncaught
    # Before the thread pools end, which a save needs: the handlers of `atexit` come too late.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_on_exit)


def _on_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Closes the runs as their blocks would do, then prints the exception as before."""
    if not hasattr(sys, "ps1"):
        for healer in reversed(_started):
            _close(healer, error)
    assert _previous_hook is not None
    _previous_hook(kind, error, trace)


def _on_exit() -> None:
    """Closes the runs that are still open. Sets the exit status if the run is incomplete."""
    status = 0
    for healer in reversed(_started):
        status = _close(healer, exits.newest_end() or _early_end(healer)) or status
    if status:
        # Python has chosen the status already. The other handlers run first.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _close(healer: Healer[Any], error: BaseException | None) -> int:
    """Closes a run with the exception that ends it. Prints another one, and returns its status."""
    if not healer.is_open:
        return 0
    try:
        healer.close(error)
    except SystemExit as replacement:
        print(replacement, file=sys.stderr)
        return 1
    return 0


def _early_end(healer: Healer[Any]) -> BaseException | None:
    """The reason to resume a run that has left its loop within the body, or None."""
    if not healer._left_loop_early:
        return None
    return exits.EndRequested("a program that has left its loop early")
