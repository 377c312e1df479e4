"""`Stopping`: stops a run that cannot train on, with a diagnosis."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from healcore.core.decision import Cause
from healcore.core.step_record import SKIPS
from healcore.events.models import Ending
from healcore.runtime.reporting.diagnosis import RunOutcome, explain
from healcore.runtime.run.ending.exits import RunStopped

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


class Stopping:
    """Stops the run: whatever decides to stop calls `stop`.

        next start       written, so that it takes an earlier snapshot without the tries
        unread steps     counted
        diagnosis        made of the outcome (`RunOutcome.of`), and written as the event `stop`
        RunStopped       raised; it leaves the loop

    `end_run` then writes the reports and closes the run.

    Args:
        run: the parts of the run. The diagnosis describes all of them, also `recovery`, which is
            made later.

    Attributes:
        stopped: the exception that has stopped the run, or None.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.stopped: RunStopped | None = None

    def stop(
        self,
        why: str,
        *,
        error: BaseException | None = None,
        fault: Cause = Cause(0),  # noqa: B008 -- immutable
        onset: int | None = None,
    ) -> NoReturn:
        """Stops the run with a diagnosis.

        What was tried for the trouble has failed, so the next start undoes it.

        Args:
            why: the reason, as a clause.
            error: the exception that is the reason, or None. It becomes the cause of RunStopped.
            fault: what kind of failure `error` is, or no flags without `error`.
            onset: step at which the trouble begins, or None for the last unhealthy steps.

        Raises:
            RunStopped: always.
        """
        if error is None:
            if onset is None:
                onset = self.run.journal.first_consecutive(self.run.journal.next_step - 1)
            self.run.way_back.before_next_start(onset)
        self.count_last_steps()
        outcome = RunOutcome.of(self.run, Ending.STOPPED, why, fault=fault)
        text = explain(outcome)
        good = outcome.last_good
        self.run.log.event(
            "stop", step=outcome.step, why=why, diagnosis=text, checkpoint=good, cause=fault or None
        )
        self.stopped = RunStopped(text, why, good)
        if self.run.ranks.rank:  # several screens of text would be printed once for each rank
            self.stopped.code = f"healcore stopped the run: {why} (rank 0 has the diagnosis)"
        raise self.stopped from error

    def count_last_steps(self) -> None:
        """Counts the unread steps at the end of a run, on which nothing acts. Not collective.

        Called for the postmortem, whose counts include all steps. After an exception the ranks have
        left their loop at different places, so no call may wait for another rank.
        """
        for result in self.run.dispatch_queue.read_all():
            several = self.run.metrics.has_several_engines
            self.run.log.records(result.index, result.records, several=several)
            self.run.metrics.add(result.records)
            self.run.ledger.skips += result.why in SKIPS
