"""`EndReport`: what a run says at its end: the postmortem, the last event and the last line."""

from __future__ import annotations

import contextlib
import traceback
from typing import TYPE_CHECKING

from healcore.console import error_text, first_of, with_short_arrays
from healcore.core.decision import Cause
from healcore.core.errors import HealcoreError
from healcore.events.models import Ending
from healcore.events.sentences import batch_names
from healcore.runtime.faults.classification import Fault, is_broken_connection
from healcore.runtime.faults.nan_checks import nan_variables
from healcore.runtime.reporting import postmortem
from healcore.runtime.reporting.diagnosis import AFTER_A_KILL, advice, last_line, lasting_text
from healcore.runtime.reporting.run_outcome import RunOutcome
from healcore.runtime.run.ending.exits import (
    RunStopped,
)
from healcore.runtime.run.ending.outcome import listed_checkpoints, outcome_of

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


class EndReport:
    """The texts at the end of one run.

    Args:
        run: the parts of the run.
        error: the exception that ends the block, or None.
        raised: the exception of the loop, also as the cause of a stop, or None.
        ending: how the run ends.
        fault: the classified `raised`, or None.
        memory_text: sentence about what holds the memory after an out-of-memory error, or empty.
    """

    def __init__(
        self,
        run: Run,
        error: BaseException | None,
        *,
        raised: BaseException | None,
        ending: Ending,
        fault: Fault | None,
        memory_text: str,
    ) -> None:
        self.run = run
        self._error = error
        self._raised = raised
        self._ending = ending
        self._fault = fault
        self._memory_text = memory_text

    def explain_nan(self) -> None:
        """Says what to do about a program that raises at NaN itself, before the policy can skip.

        Such a program may end at each restart at the same step. The warning names the variables
        with NaN, the step and its batches. It is written only if the policy skips steps with NaN
        and the exception has no other known cause.
        """
        error, step = self._raised, self.run.progress.step
        if error is None or not self.run.policy.skips_nonfinite or isinstance(error, HealcoreError):
            return
        if not (isinstance(error, Exception) or (isinstance(error, SystemExit) and error.code)):
            return
        if self._fault is not None and self._fault.cause != Cause.UNKNOWN:
            return
        names = nan_variables(error)
        if not names:
            return
        pending = self.run.step_batches.pending_ids
        batches = pending or self.run.step_batches.last_ids
        rows = [each.rows for each in batches if each.rows]
        places = batch_names([list(each) for each in batches], rows)
        step_with_nan = step
        if not pending:
            step_with_nan = max(0, step - 1)  # the last step that was taken
        where = f"step {step_with_nan}"
        if places:
            where += f", {first_of(places)}"
        again = ""
        events = self.run.log.events.path
        if events is not None:
            earlier = postmortem.same_end_before(events, step, type(error).__name__)
            if earlier:
                again = f"An earlier start has ended at this step in the same way ({earlier}). "
        self.run.loop.warn(
            f"{first_of(names)} had NaN at {where}, and the program itself raised "
            f"{type(error).__name__}. {again}If that is a check for NaN, remove this check: "
            "healcore skips the step, and the run continues. set_detect_anomaly and the "
            "validate_args of a distribution are such checks too"
        )

    def write(self) -> None:
        """Writes the postmortem, the last event and the last line.

        The postmortem comes first: a start writes a missing postmortem only without the event
        `end`.
        """
        self._shorten_on_other_ranks()
        ending, error = self._ending, self._error
        with contextlib.suppress(Exception):  # a step in JAX that failed may have donated the state
            self.run.loop.count_last_step()
            self.run.stopping.count_last_steps()
            self.run.monitor.read_engines()
        why = self.run.loop.state.break_place if error is None else getattr(error, "why", "")
        if isinstance(error, RunStopped) and ending != Ending.STOPPED:
            why = ""  # the reason of another run
        exception = trace = None
        if ending == Ending.EXCEPTION and error is not None:
            exception = self._exception_text(error)
            trace = with_short_arrays("".join(traceback.format_exception(error)))
        fault = self._fault or Fault(Cause(0), "")
        outcome = outcome_of(
            self.run, ending, why, exception=exception, fault=fault.cause, hint=fault.hint
        )
        events = self.run.log.events
        # The earlier process that has completed the run has written the postmortem.
        is_complete = self.run.loop.state.is_complete and ending == Ending.COMPLETED
        if events.path is not None and not is_complete:
            problem = postmortem.write(events.path, outcome, trace=trace, lost=events.lost)
            if problem:
                self.run.log.warning(problem)
        self.run.log.event(
            "end",
            step=outcome.step,
            ending=outcome.ending,
            incidents=outcome.counts.incidents,
            rollbacks=outcome.counts.rollbacks,
            last_good=outcome.last_good,
            steps_lost=outcome.steps_lost or None,
        )
        if not is_complete:  # otherwise the first line has said so
            self._log_last_line(outcome)

    def _shorten_on_other_ranks(self) -> None:
        """Gives a stop of the policy a short text on ranks other than 0.

        The diagnosis of several screens would otherwise be printed once for each rank.
        """
        if isinstance(self._error, RunStopped) and self.run.ranks.rank:
            why = self._error.why
            self._error.code = f"healcore stopped the run: {why} (rank 0 has the diagnosis)"

    def _exception_text(self, error: BaseException) -> str:
        """The text of the exception that ends the run, for the postmortem.

        After an out-of-memory error it also says what holds the memory. After a broken connection
        it says that the cause is in the output of another rank.

        Args:
            error: the exception.
        """
        text = error_text(error) + self._memory_text
        if is_broken_connection(error):
            text += ". Another rank has ended: its output says why, unless it was killed; "
            text += f"then {AFTER_A_KILL}"
        return text

    def _log_last_line(self, outcome: RunOutcome) -> None:
        """Logs how the run has ended.

        An exception or a stop is logged as an error. The line names the newest checkpoint on disk.
        A warning follows if an alarm such as a plateau lasts at the end.

        Args:
            outcome: how the run has ended, as in the postmortem.
        """
        ending = self._ending
        newest = None  # the newest checkpoint on disk
        for saved in listed_checkpoints(self.run):
            if saved.path and not saved.is_abandoned:
                newest = saved.step if newest is None else max(newest, saved.step)
        progress = self.run.progress
        if ending == Ending.COMPLETED and progress.had_completed and progress.resumed_here:
            self.run.log.warning(
                f"completed earlier, at step {outcome.step}: nothing was trained, and the state is "
                "the saved state; an empty directory begins a new run"
            )
        elif ending in (Ending.EXCEPTION, Ending.STOPPED):
            self.run.log.error(last_line(outcome, newest))
        elif outcome.unrepaired:
            self.run.log.warning(last_line(outcome, newest))
        else:
            self.run.log.info(last_line(outcome, newest))
        if outcome.lasting:
            hints = " ".join(advice(outcome.lasting))
            self.run.log.warning(f"the run is not healthy: {lasting_text(outcome)}. {hints}")
