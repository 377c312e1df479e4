"""`AlarmLog`: the events and console lines of the alarms of a run."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from healcore.console import is_logged, passes_power_of_ten
from healcore.core.decision import NONFINITE, Action
from healcore.core.step_record import SKIPS, StepRecord
from healcore.events.models import EventRecord
from healcore.events.schema import sentence
from healcore.history.incidents import MAX_ALARMS
from healcore.runtime.driver import Driver
from healcore.runtime.faults.failures import Severity, failures_of
from healcore.runtime.reporting.nonfinite_steps import by_optimizer_text
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.incidents.alerts import Alerts
from healcore.runtime.run.incidents.bad_rows import BadRows
from healcore.runtime.run.incidents.judged_record import JudgedRecord, batch_fields
from healcore.runtime.run.incidents.rate_log import RateLog
from healcore.runtime.run_options import HostPolicy

if TYPE_CHECKING:
    from healcore.runtime.run.record.ledger import Ledger


class AlarmLog:
    """Writes the event of each alarm, and a console line for the alarms that a person should see.

    A run may have an alarm at every step for hours. So lines become rarer with their number, and
    after `MAX_ALARMS` alarms so do events. The metrics file has all alarms. Otherwise the first
    alarms would be lost among thousands of equal lines.

    Args:
        policy: the policy. If it only observes, the lines say what it would have done.
        log: the log, for the events and the lines.
        ledger: counts the skipped steps.
        driver: has the learning rates, and the numbers that made an update NaN.
        rate_log: has the learning rates of the steps before.

    Attributes:
        alerts: decides about the alerts of the same steps.
    """

    def __init__(
        self,
        *,
        policy: HostPolicy,
        log: RunLog,
        ledger: Ledger,
        driver: Driver,
        rate_log: RateLog,
    ) -> None:
        self._policy = policy
        self._log = log
        self._ledger = ledger
        self._driver = driver
        self.alerts = Alerts(policy=policy, log=log, ledger=ledger)
        self._rate_log = rate_log
        self._bad_rows = BadRows()
        self._outside = 0
        """Number of alarms outside of incidents."""
        self._explained: set[str] = set()
        """Diagnoses on the console so far: a line has each of them once."""

    def decide_line(self, judged: list[JudgedRecord], lead: JudgedRecord) -> bool:
        """Decides whether a step has a console line, which is about one of its records.

        - Every cut of the learning rate.
        - Incidents: the first ten, then each power of two.
        - Skipped steps, and alarms outside of incidents (such as a clipped outlier): the first,
          then each power of ten.
        - Alerts outside of incidents: see `Alerts.decide_alert_line`.

        Args:
            judged: the records of the step. Call this once for each step, because alerts are
                counted.
            lead: the record that the line would be about.
        """
        if self.alerts.decide_alert_line(judged):
            return True
        if lead.record.action & Action.CUT_LR and not self._policy.observes:
            return True
        incident = lead.incident
        if incident is not None and incident.alarms == 1 and is_logged(incident.number):
            return True
        skips = self._ledger.skips
        if passes_power_of_ten(skips - (lead.result.why in SKIPS), skips):
            return True
        if incident is not None:
            return False
        alarms = sum(record.cause != 0 for record in lead.result.records)
        return passes_power_of_ten(self._outside, self._outside + alarms)

    def write(self, judged: JudgedRecord, *, has_line: bool) -> None:
        """Writes the event of an alarm, and its line.

        Args:
            judged: a record with a cause.
            has_line: whether the record has the line of its step.
        """
        result, record, incident = judged.result, judged.record, judged.incident
        if self._count(judged) > MAX_ALARMS and not has_line and not judged.alert:
            return
        by_optimizer = None
        if record.by_optimizer:
            by_optimizer = by_optimizer_text(record.lr)
        event = self._write_event(judged, by_optimizer, has_line=has_line)
        if has_line:
            explanation = by_optimizer or failures_of(record.cause)[0].diagnosis
            self._write_line(judged, sentence(event), explanation)
        begins = incident is not None and incident.alarms == 1
        if begins and not record.taken and record.cause & NONFINITE:
            text = self._bad_rows.add(result.batches)
            if text:
                self._log.warning(f"step {result.index}: {text}")

    def _count(self, judged: JudgedRecord) -> int:
        """Counts an alarm, and returns its number in its incident, or outside of incidents.

        The first alarm that has no event for its number is announced by a line.
        """
        if judged.incident is not None:
            return judged.incident.alarms
        self._outside += 1
        if self._outside == MAX_ALARMS + 1:
            self._log.info(
                f"step {judged.result.index}: more than {MAX_ALARMS} alarms outside of incidents: "
                "from now on only those with an alert or a line have an event; the metrics "
                "file has them all"
            )
        return self._outside

    def _write_event(
        self, judged: JudgedRecord, diagnosis: str | None, *, has_line: bool
    ) -> EventRecord:
        """Writes the event of an alarm, and returns it. The rates are for the line only."""
        result, record = judged.result, judged.record
        rate = rate_before = None
        if has_line:
            rate = self._rate_of(record)
            rate_before = self._rate_log.rate_before(result.index, record)
        skips = None
        if not record.taken and not self._policy.observes:
            skips = self._ledger.skips
        grad_scale = None
        if not self._policy.engine.per_tensor:
            grad_scale = record.grad_scale
        return self._log.event(
            "alarm",
            step=result.index,
            engine=record.engine,
            incident=judged.number,
            cause=record.cause,
            skip=not record.taken,
            skips=skips,
            grad_scale=grad_scale,
            lr=rate,
            lr_before=rate_before,
            lr_scale=record.lr_scale,
            action=record.action,
            readings=record.readings,
            evidence=record.evidence,
            diagnosis=diagnosis,
            observed=self._policy.observes,
            **batch_fields(result),
        )

    def _write_line(self, judged: JudgedRecord, text: str, explanation: str) -> None:
        """Writes the console line of an alarm.

        Args:
            judged: the record of the alarm.
            text: the sentence about its event.
            explanation: the diagnosis, which the first line with it has too.
        """
        result, record, incident = judged.result, judged.record, judged.incident
        which = ""
        if incident is not None:
            which = f"incident {incident.number}: "
        line = f"step {result.index}: {which}{text}"
        if explanation not in self._explained:
            self._explained.add(explanation)
            line += f". {explanation}"
        if failures_of(record.cause)[0].severity is Severity.ERROR:
            self._log.error(line)
        else:
            self._log.warning(line)

    def _rate_of(self, record: StepRecord) -> float | None:
        """The learning rate of a step, or None if it is unknown.

        The program may have set another rate since that step, for example the usual rate after a
        step at a wrong one.
        """
        if record.lr is not None:
            return float(record.lr)
        with suppress(RuntimeError):  # a step in JAX that failed may have donated the state
            return self._driver.learning_rates().get(record.engine)
        return None
