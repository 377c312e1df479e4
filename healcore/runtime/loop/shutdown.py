"""The end of a run, in every way that leaves the process time for it.

The next start writes the postmortem of a process that was killed (`postmortem.of_killed`). Errors
in here are reported and not raised: they would hide the error that has ended the run.
"""

from __future__ import annotations

import contextlib
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

from healcore.runtime.loop.exits import LastStateNotSaved, RunStopped
from healcore.runtime.loop.loop import Loop
from healcore.runtime.loop.termination import Terminated
from healcore.runtime.postmortem import postmortem
from healcore.runtime.store import StoreError
from healcore.runtime.store.memory import SnapshotStore

_LAST = "the last state could not be saved"


def ending_of(error: BaseException | None, signal_number: int | None = None) -> str:
    """How a run ended.

    Args:
        error: what was raised out of its block.
        signal_number: a signal that the run has received.
    """
    if error is None:
        return "completed"
    if isinstance(error, RunStopped):
        return "stopped"
    # torch's loader raises when the signal has killed its workers too.
    killed = signal_number == signal.SIGTERM and "DataLoader worker" in str(error)
    if isinstance(error, Terminated) or killed:
        return "signal"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "exception"


def close(loop: Loop, error: BaseException | None) -> LastStateNotSaved | None:
    """Ends a run.

    Args:
        loop: of the run.
        error: what was raised out of the block; None: nothing.

    Returns:
        What the block must raise although the loop has completed.
    """
    ending = ending_of(error, loop.termination.signal_number)
    problems: list[str] = []

    def attempt(what: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as problem:
            problems.append(f"{what}: {type(problem).__name__}: {problem}")

    # A rank that ends alone, or a step before the others, must not wait for them.
    together = ending == "completed" or loop.ranks.world == 1
    if ending == "completed":
        attempt("the last steps could not be read", loop.read_remaining)
    if together and (ending == "completed" or (loop.between_steps and ending != "stopped")):
        # Not after an exception within a step, which leaves the state half changed.
        attempt(_LAST, loop.save_last)
    attempt("checkpoints being written", loop.checkpoints.wait)
    not_saved = None
    if ending == "completed" and any(loop.ranks.gather(_last_state_lost(loop, problems))):
        # The journal must not say "completed": the program started again resumes and saves it.
        error = not_saved = LastStateNotSaved(_not_saved(loop, problems))
        ending = "exception"
    if together:
        attempt("checkpoints on probation", lambda: loop.checkpoints.finish(loop.ledger, loop.step))
        attempt("the last saves", loop.checkpoints.nonfinite_checkpoints)
    attempt("the journal", lambda: loop.write_ending(ending))
    if ending in ("interrupted", "signal"):
        newest = loop.journal.state.newest_on_disk if loop.journal.path is not None else None
        on_disk = "nothing is on disk" if newest is None else f"checkpoint {newest} is on disk"
        ended = "interrupted" if ending == "interrupted" else "ended by a signal"
        loop.console.info(f"{ended} after step {loop.step}: {on_disk}")
    for problem in problems:
        loop.log_event("problem", step=loop.step, problem=problem)
        loop.console.warning(problem)
    _write_end(loop, ending, error)
    for end in (
        loop.termination.stop,
        loop.checkpoints.close,
        loop.driver.close,
        loop.release,
        loop.console.end,
        loop.metrics.close,
        loop.log.close,
    ):
        with contextlib.suppress(Exception):
            end()
    return not_saved


def _last_state_lost(loop: Loop, problems: list[str]) -> bool:
    """Whether the save of the last state has failed, at once or in the background."""
    if isinstance(loop.checkpoints.store, SnapshotStore):
        return False  # its checkpoints end with the process in any case
    failed = any(problem.startswith(_LAST) for problem in problems)
    return loop.step in loop.checkpoints.unsaved or failed


def _not_saved(loop: Loop, problems: list[str]) -> str:
    store: Any = loop.checkpoints.store
    try:  # the checkpoints that survive the process
        newest = max((save.step for save in getattr(store, "disk", store).steps()), default=None)
        target = "starts from the beginning"
        if newest is not None:
            target = f"resumes from the checkpoint of step {newest}"
    except (StoreError, OSError):
        target = "resumes from the newest checkpoint"
    why = loop.checkpoints.last_failure or next(iter(problems), "it failed on another rank")
    return (
        f"healcore: the loop has ended at step {loop.step}, and its last state is not saved "
        f"({why}). Remove the cause and start the program again: it {target}"
    )


def _write_end(loop: Loop, ending: str, error: BaseException | None) -> None:
    """Writes the postmortem and the last event."""
    exception = trace = None
    if ending == "exception" and error is not None:
        exception = "".join(traceback.format_exception_only(error)).strip()
        trace = "".join(traceback.format_exception(error))
    case = loop.case(ending, _why(error), exception)
    # Before the event: the next start looks for a missing postmortem only if there is no end event.
    if loop.log.path is not None and not loop.ranks.rank:
        found = postmortem.of(case, loop.log, seconds=time.monotonic() - loop.began, trace=trace)
        problem = postmortem.write(postmortem.path_for(loop.log.path, loop.log.run), found)
        if problem:
            loop.console.warning(problem)
    loop.log_event(
        "end",
        step=loop.step,
        ending=ending,
        incidents=case.incidents,
        rollbacks=loop.journal.state.rollbacks,
        last_good=case.last_good,
        untold_alarms=loop.monitor.unlogged_alarms or None,
    )


def _why(error: BaseException | None) -> str:
    if isinstance(error, Terminated):
        return f"signal {error.number}"
    if isinstance(error, RunStopped):
        return error.why
    return ""
