"""The end of a run, in every way that leaves time to say so.

The postmortem of one that had none is written by the next start (`postmortem.of_killed`). What
fails in here is told, not raised: it would hide what the run has died of.
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
from healcore.runtime.store.memory import MemoryStore

_LAST = "the last state could not be saved"


def ending_of(error: BaseException | None, asked: int | None = None) -> str:
    """How a run ended.

    Args:
        error: what has left its block.
        asked: a signal that had come.
    """
    if error is None:
        return "completed"
    if isinstance(error, RunStopped):
        return "stopped"
    # torch's loader raises when the signal has killed its workers too.
    killed = asked == signal.SIGTERM and "DataLoader worker" in str(error)
    if isinstance(error, Terminated) or killed:
        return "signal"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "exception"


def close(loop: Loop, error: BaseException | None) -> LastStateNotSaved | None:
    """Ends a run.

    Args:
        loop: of the run.
        error: what has left the block, None if nothing has.

    Returns:
        What to raise instead of ending well.
    """
    ending = ending_of(error, loop.termination.asked)
    trouble: list[str] = []

    def attempt(what: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as problem:
            trouble.append(f"{what}: {type(problem).__name__}: {problem}")

    # A rank that ends alone, or a step before the others, must not wait for them.
    together = ending == "completed" or loop.ranks.world == 1
    if ending == "completed":
        attempt("the last steps could not be read", loop.drain)
    if together and (ending == "completed" or (loop.whole and ending != "stopped")):
        # Between two steps, so the state is whole; an exception within one leaves it half done.
        attempt(_LAST, loop.save_last)
    attempt("checkpoints being written", loop.checkpoints.settle)
    lost = None
    if ending == "completed" and any(loop.ranks.gather(_is_lost(loop, trouble))):
        # Not completed for the journal: the program started again goes on and saves it.
        error = lost = LastStateNotSaved(_not_saved(loop, trouble))
        ending = "exception"
    if together:
        attempt(
            "checkpoints on probation", lambda: loop.checkpoints.wrap_up(loop.ledger, loop.step)
        )
        attempt("the last saves", loop.checkpoints.found_not_finite)
    attempt("the journal", lambda: loop.note_ending(ending))
    if ending in ("interrupted", "signal"):
        saved = loop.journal.page.saved if loop.journal.path is not None else None
        there = "nothing is on disk" if saved is None else f"checkpoint {saved} is on disk"
        ended = "interrupted" if ending == "interrupted" else "ended by a signal"
        loop.console.info(f"{ended} after step {loop.step}: {there}")
    for problem in trouble:
        loop.log_event("problem", step=loop.step, problem=problem)
        loop.console.warning(problem)
    _report(loop, ending, error)
    for end in (
        loop.termination.release,
        loop.checkpoints.close,
        loop.driver.close,
        loop.release,
        loop.console.end,
        loop.metrics.close,
        loop.log.close,
    ):
        with contextlib.suppress(Exception):
            end()
    return lost


def _is_lost(loop: Loop, trouble: list[str]) -> bool:
    """Whether the save of the last state has failed, at once or in the background."""
    if isinstance(loop.checkpoints.store, MemoryStore):
        return False  # gone with the process in any case
    return loop.step in loop.checkpoints.unsaved or any(line.startswith(_LAST) for line in trouble)


def _not_saved(loop: Loop, trouble: list[str]) -> str:
    store: Any = loop.checkpoints.store
    try:  # what outlives the process
        newest = max((save.step for save in getattr(store, "disk", store).steps()), default=None)
        there = "the beginning" if newest is None else f"the checkpoint of step {newest}"
    except (StoreError, OSError):
        there = "the newest checkpoint"
    why = loop.checkpoints.trouble or next(iter(trouble), "it failed on another rank")
    return (
        f"healcore: the loop has ended at step {loop.step}, and its last state is not saved "
        f"({why}). Make it possible to save, and start the program again: it goes on from {there}"
    )


def _report(loop: Loop, ending: str, error: BaseException | None) -> None:
    raised = trace = None
    if ending == "exception" and error is not None:
        raised = "".join(traceback.format_exception_only(error)).strip()
        trace = "".join(traceback.format_exception(error))
    case = loop.case(ending, _why(error), raised)
    # First this: a run whose events have an end is not asked any more what it has died of.
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
        rollbacks=loop.journal.page.rollbacks,
        last_good=case.last_good,
        untold_alarms=loop.judge.untold or None,
    )


def _why(error: BaseException | None) -> str:
    if isinstance(error, Terminated):
        return f"signal {error.number}"
    if isinstance(error, RunStopped):
        return error.why
    return ""
