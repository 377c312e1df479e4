"""What a run says at its end: the postmortem, the last event and the last line."""

from __future__ import annotations

import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

from healcore.console import error_text
from healcore.events.models import Ending
from healcore.runtime.faults.classification import Fault, is_broken_connection
from healcore.runtime.reporting import postmortem
from healcore.runtime.reporting.diagnosis import (
    AFTER_A_KILL,
    RunOutcome,
    advice,
    last_line,
    lasting_text,
    listed_checkpoints,
)
from healcore.runtime.run.ending.exits import RunStopped

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


def write_report(
    run: Run, ending: Ending, error: BaseException | None, fault: Fault, memory: str
) -> None:
    """Writes the postmortem, the last event and the last line.

    The postmortem comes first: a start writes a missing postmortem only without the event `end`. If
    an earlier process has completed the run, it has written the postmortem.

    Args:
        run: the parts of the run.
        ending: how the run ends.
        error: the exception that ends the run, or None.
        fault: the classified exception of the program.
        memory: sentence about what holds the memory after an out-of-memory error, or empty.
    """
    with suppress(Exception):  # a step in JAX that failed may have donated the state
        run.loop.count_last_step()
        run.stopping.count_last_steps()
        run.monitor.read_engines()
    why = getattr(error, "why", "")
    if error is None:
        why = run.loop.state.break_place
    exception = trace = None
    if ending == Ending.EXCEPTION and error is not None:
        if isinstance(error, RunStopped):
            why = ""  # the reason of another run
        trace = "".join(traceback.format_exception(error))
        exception = error_text(error) + memory
        if is_broken_connection(error):
            exception += ". Another rank has ended: its output says why, unless it was killed; "
            exception += f"then {AFTER_A_KILL}"
    outcome = RunOutcome.of(run, ending, why, exception=exception, fault=fault.cause)
    events = run.log.events
    was_complete = run.loop.state.is_complete and ending == Ending.COMPLETED
    if events.path is not None and not was_complete:
        problem = postmortem.write(events.path, outcome, trace=trace)
        if problem:
            run.log.warning(problem)
    run.log.event(
        "end",
        step=outcome.step,
        ending=outcome.ending,
        incidents=outcome.counts.incidents,
        rollbacks=outcome.counts.rollbacks,
        last_good=outcome.last_good,
        steps_lost=outcome.steps_lost or None,
    )
    if not was_complete:  # otherwise the first line has said so
        _log_last_line(run, outcome)


def _log_last_line(run: Run, outcome: RunOutcome) -> None:
    """Logs how the run has ended, and the newest checkpoint on disk.

    An exception or a stop is logged as an error. A warning follows if an alarm such as a plateau
    lasts at the end.
    """
    on_disk = [each.step for each in listed_checkpoints(run) if each.path and not each.is_abandoned]
    line = last_line(outcome, max(on_disk, default=None))
    progress = run.progress
    if outcome.ending == Ending.COMPLETED and progress.had_completed and progress.resumed_here:
        run.log.warning(
            f"completed earlier, at step {outcome.step}: nothing was trained, and the state is "
            "the saved state; an empty directory begins a new run"
        )
    elif outcome.ending in (Ending.EXCEPTION, Ending.STOPPED):
        run.log.error(line)
    elif outcome.unrepaired:
        run.log.warning(line)
    else:
        run.log.info(line)
    if outcome.lasting:
        hints = " ".join(advice(outcome.lasting))
        run.log.warning(f"the run is not healthy: {lasting_text(outcome)}. {hints}")
