"""`IncidentLog`: writes the events of the beginning and of the end of each incident."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healcore.console import is_logged
from healcore.core.decision import Cause
from healcore.events.schema import sentence
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.incidents.judged_record import batch_fields
from healcore.runtime.run.incidents.metrics import RunMetrics
from healcore.runtime.store.ranks import Ranks

if TYPE_CHECKING:
    from healcore.runtime.run.record.ledger import IncidentRecord, Ledger


class IncidentLog:
    """Writes an event when an incident begins, and when it is over.

    An incident is reported as over once its engine has closed it and `quiet_steps` steps had no
    alarm.

    Args:
        log: the log, for the events and the lines.
        ledger: has the incidents.
        ranks: the ranks, whose signals are in the event of a beginning.
        metrics: has the newest record of each engine, for the event of the end.
        quiet_steps: steps without an alarm after which an incident is reported as over.
    """

    def __init__(
        self,
        *,
        log: RunLog,
        ledger: Ledger,
        ranks: Ranks,
        metrics: RunMetrics,
        quiet_steps: int,
    ) -> None:
        self._log = log
        self._ledger = ledger
        self._ranks = ranks
        self._metrics = metrics
        self._quiet_steps = quiet_steps
        self._unclosed: list[IncidentRecord] = []
        """Incidents without an event `over`."""

    def continue_incidents(self) -> None:
        """Continues the incidents of an earlier process. Called after its ledger was read.

        Incidents whose end was not reported are watched again. Without this, the log would have the
        beginning of such an incident and never its end.
        """
        incidents = self._ledger.incidents
        self._unclosed = [each for each in incidents if not each.reported_over]

    def begin(self, incident: IncidentRecord, result: StepResult) -> None:
        """Writes the event of a new incident, with the signals of each rank. Collective.

        Args:
            incident: the incident.
            result: its first step.
        """
        self._unclosed.append(incident)
        first = max(result.records, key=lambda record: record.cause != 0)
        of_ranks = None
        if first.rank_signals is not None and self._ranks.world > 1:
            of_ranks = []
            for rank, (loss, norm) in enumerate(self._ranks.gather(first.rank_signals)):
                of_ranks.append({"rank": rank, "loss": loss, "grad_norm": norm})
        self._log.event(
            "incident",
            step=result.index,
            incident=incident.number,
            onset=incident.onset,
            cause=Cause(incident.cause),
            of_ranks=of_ranks,
            **batch_fields(result),
        )

    def report_over(self, result: StepResult) -> None:
        """Writes an event for each incident after which the run was quiet for long enough.

        Args:
            result: the newest step.
        """
        if not self._unclosed:
            return
        newest = result.index - self._quiet_steps
        for incident in self._unclosed:
            if not incident.over or incident.last > newest:
                return
        quiet = self._unclosed
        self._unclosed = []
        for incident in quiet:
            incident.reported_over = True
            # The optimizer of the incident may have taken no step now.
            record = self._metrics.newest(incident.engine) or result.records[0]
            event = self._log.event(
                "over",
                step=result.index,
                incident=incident.number,
                onset=incident.onset,
                last=incident.last,
                engine=record.engine,
                cause=Cause(incident.cause),
                readings=record.readings,
            )
            if is_logged(incident.number):
                self._log.info(f"step {result.index}: {sentence(event)}")
