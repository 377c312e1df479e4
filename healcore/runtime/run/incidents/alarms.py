"""`Alarms`: the events and console lines of alarms, alerts and incidents.

An alarm is a step with a cause. Alarms that follow one another closely are one incident. An alert
reports a fault about which nothing may be decided yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from healcore.console import is_logged, passes_power_of_ten
from healcore.core.decision import Action, Cause, names_of
from healcore.core.engine.config import RuleConfig
from healcore.core.step_record import SKIPS, StepRecord
from healcore.events.kinds import sentence
from healcore.events.models import EventRecord
from healcore.history.incidents import MAX_ALARMS
from healcore.runtime.faults.failures import Severity, failures_of
from healcore.runtime.reporting.nonfinite_steps import by_optimizer_text
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.ledger import IncidentRecord

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


class JudgedRecord(NamedTuple):
    """The record of one optimizer that has a cause or an action, with its step and incident."""

    result: StepResult
    """The step, with the records of all optimizers."""
    record: StepRecord
    """The record of one optimizer."""
    incident: IncidentRecord | None
    """The incident that the step belongs to, or None for an alarm outside of incidents."""
    alert: Cause = Cause(0)
    """Causes of an alert, or 0 without one."""

    @property
    def number(self) -> int:
        """Number of the incident, or 0 without one: the field `incident` of events."""
        if self.incident is None:
            return 0
        return self.incident.number

    def priority(self) -> tuple[bool, bool, bool, bool]:
        """Sort key: with several optimizers, the line is about the record with the largest key.

        A cut of the learning rate matters most, then a skipped step, then an alert, then any other
        cause.
        """
        action = int(self.record.action)  # flags of an int are faster than flags of an enum
        cuts = bool(action & int(Action.CUT_LR))
        alerts = bool(action & int(Action.ALERT))
        return cuts, not self.record.taken, alerts, self.record.cause != 0


class Alarms:
    """Writes the event of each alarm, and a console line for the alarms that a person should see.

    A run may have an alarm at every step for hours. So lines become rarer with their number, and
    after `MAX_ALARMS` alarms so do events. The metrics file has all alarms. Otherwise the first
    alarms would be lost among thousands of equal lines.

    The engine orders an alert once per rule. A rule names several causes, and one of them may last
    for the rest of the run and hide the start of another one. So the host alerts each cause when it
    begins.

    Args:
        run: the parts of the run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        config, incident = run.policy.engine.config, run.policy.incident
        self._quiet_steps = int(config.incident.quiet_steps)
        """Steps without an alarm after which an incident is reported as over."""
        self._reports_all = bool(incident.alert_steps)
        """Whether every alert is reported, because the policy sets `alert_steps` itself."""
        self._steps_without = incident.alert_steps or self._quiet_steps
        """Steps without a cause after which the cause begins again."""
        self._alerting = _alerting_causes((*config.rules, *run.policy.host_rules))
        self._alerted: set[tuple[int, Cause]] = set()
        """Number of an incident, and causes, of the events `alert` so far."""
        self._faults: Counter[str] = Counter()
        """Engine and cause -> steps with an alert about it outside of incidents."""
        self._outside = 0
        """Number of alarms outside of incidents."""
        self._explained: set[str] = set()
        """Failures whose page the console has named."""

    # -- incidents ------------------------------------------------------------------------------

    def begin(self, incident: IncidentRecord, result: StepResult) -> None:
        """Writes the event of a new incident, with the signals of each rank. Collective.

        Args:
            incident: the incident.
            result: its first step.
        """
        ranks = self.run.ranks
        first = max(result.records, key=lambda record: record.cause != 0)
        of_ranks = None
        if first.rank_signals is not None and ranks.world > 1:
            of_ranks = []
            for rank, (loss, norm) in enumerate(ranks.gather(first.rank_signals)):
                of_ranks.append({"rank": rank, "loss": loss, "grad_norm": norm})
        self.run.log.event(
            "incident",
            step=result.index,
            incident=incident.number,
            onset=incident.onset,
            cause=Cause(incident.cause),
            of_ranks=of_ranks,
            **_batch_fields(result),
        )

    def report_over(self, result: StepResult) -> None:
        """Writes the event of each incident that is over.

        Its engine has closed it, and `quiet_steps` steps had no alarm.

        Args:
            result: the newest step.
        """
        unclosed: list[IncidentRecord] = []
        for incident in reversed(self.run.ledger.incidents):
            if incident.reported_over:  # a step has few calls
                break
            unclosed.insert(0, incident)
        newest = result.index - self._quiet_steps
        if not all(incident.over and incident.last <= newest for incident in unclosed):
            return
        for incident in unclosed:
            incident.reported_over = True
            record = self.run.monitor.metrics.newest(incident.engine) or result.records[0]
            event = self.run.log.event(
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
                self.run.log.info(f"step {result.index}: {sentence(event)}")

    # -- alarms ---------------------------------------------------------------------------------

    def decide_line(self, judged: list[JudgedRecord], lead: JudgedRecord) -> bool:
        """Decides whether a step has a console line, which is about one of its records.

        - Every cut of the learning rate.
        - Incidents: the first ten, then each power of two.
        - Skipped steps, and alarms outside of incidents (such as a clipped outlier): the first,
          then each power of ten.
        - Alerts outside of incidents: the first ten of each optimizer and cause, then each power of
          two.

        Args:
            judged: the records of the step. Call this once for each step, because alerts are
                counted.
            lead: the record that the line would be about.
        """
        has_line = False
        for each in judged:
            if each.incident is None:
                for name in names_of(each.alert):
                    fault = f"{each.record.engine}/{name}"
                    self._faults[fault] += 1
                    has_line |= self._reports_all or is_logged(self._faults[fault])
        if has_line or (lead.record.action & Action.CUT_LR and not self.run.policy.observes):
            return True
        incident, skips = lead.incident, self.run.ledger.skips
        if incident is not None and incident.alarms == 1 and is_logged(incident.number):
            return True
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
        if self._count(judged) > MAX_ALARMS and not has_line and not judged.alert:
            return
        record = judged.record
        by_optimizer = by_optimizer_text(record.lr) if record.by_optimizer else None
        event = self._write_event(judged, by_optimizer, has_line=has_line)
        if has_line:
            self._write_line(judged, sentence(event))

    def _count(self, judged: JudgedRecord) -> int:
        """Counts an alarm, and returns its number in its incident, or outside of incidents.

        The first alarm that has no event for its number is announced by a line.
        """
        if judged.incident is not None:
            return judged.incident.alarms
        self._outside += 1
        if self._outside == MAX_ALARMS + 1:
            self.run.log.info(
                f"step {judged.result.index}: more than {MAX_ALARMS} alarms outside of incidents: "
                "from now on only those with an alert or a line have an event; the metrics "
                "file has them all"
            )
        return self._outside

    def _write_event(
        self, judged: JudgedRecord, diagnosis: str | None, *, has_line: bool
    ) -> EventRecord:
        """Writes the event of an alarm, and returns it. The rate is for the line only."""
        result, record, policy = judged.result, judged.record, self.run.policy
        skips = None
        if not record.taken and not policy.observes:
            skips = self.run.ledger.skips
        return self.run.log.event(
            "alarm",
            step=result.index,
            engine=record.engine,
            incident=judged.number,
            cause=record.cause,
            skip=not record.taken,
            skips=skips,
            grad_scale=None if policy.engine.per_tensor else record.grad_scale,
            lr=self._rate_of(record) if has_line else None,
            lr_scale=record.lr_scale,
            action=record.action,
            readings=record.readings,
            evidence=record.evidence,
            diagnosis=diagnosis,
            observed=policy.observes,
            **_batch_fields(result),
        )

    def _write_line(self, judged: JudgedRecord, text: str) -> None:
        """Writes the console line of an alarm, and once the page about its failure.

        Args:
            judged: the record of the alarm.
            text: the sentence about its event.
        """
        which = ""
        if judged.incident is not None:
            which = f"incident {judged.number}: "
        line = f"step {judged.result.index}: {which}{text}"
        if judged.record.by_optimizer:
            line += f"; {by_optimizer_text(judged.record.lr).partition('. ')[0]}"
        failure = failures_of(judged.record.cause)[0]
        write = self.run.log.warning
        if failure.severity is Severity.ERROR:
            write = self.run.log.error
        write(line)
        if failure.name not in self._explained:
            self._explained.add(failure.name)
            write(f"what to check: docs/faults.md#{failure.name}")

    def _rate_of(self, record: StepRecord) -> float | None:
        """The learning rate of a step, or None if it is unknown.

        The program may have set another rate since that step, for example the usual rate after a
        step at a wrong one.
        """
        if record.lr is not None:
            return float(record.lr)
        with suppress(RuntimeError):  # a step in JAX that failed may have donated the state
            return self.run.driver.learning_rates().get(record.engine)
        return None

    # -- alerts ---------------------------------------------------------------------------------

    def with_alert(self, judged: JudgedRecord) -> JudgedRecord:
        """Adds the causes of the step's alert, and orders an alert on a cause that begins.

        A cause begins if `quiet_steps` steps, or the policy's own `alert_steps`, had no alarm with
        it.

        Args:
            judged: a record of the newest step.

        Returns:
            The record, with `alert` and the action ALERT if there is an alert.
        """
        record, index = judged.record, judged.result.index
        last_alarms = self.run.ledger.last_alarms
        begins = Cause(0)
        for name in names_of(record.cause):
            key = f"{record.engine}/{name}"
            last = last_alarms.get(key)
            if last is None or index - last > self._steps_without:
                begins |= Cause[name]
            last_alarms[key] = index
        if record.action & Action.ALERT:
            return judged._replace(alert=Cause(record.cause))
        begins &= self._alerting
        if not begins:
            return judged
        record = record._replace(action=Action(record.action) | Action.ALERT)
        return judged._replace(record=record, alert=begins)

    def write_alert(self, judged: JudgedRecord, action: Action, *, has_line: bool) -> None:
        """Writes the event of an alert: once per incident and cause, else if it has a line.

        Args:
            judged: the record of the alert.
            action: the actions of the step on all ranks.
            has_line: whether the step has a console line.
        """
        cause = judged.alert or Cause(judged.record.cause)  # a hook may alert too
        key = judged.number, cause
        if not (self._reports_all and judged.alert):
            if judged.number and key in self._alerted:
                return
            if not judged.number and not has_line:
                return
        self._alerted.add(key)
        rows = failures_of(cause)
        references: dict[str, None] = {}  # in order, each once
        for row in rows:
            references |= dict.fromkeys(row.references)
        self.run.log.event(
            "alert",
            step=judged.result.index,
            incident=judged.number,
            engine=judged.record.engine,
            cause=cause,
            action=action,
            severity=rows[0].severity,
            diagnosis=" ".join(row.diagnosis for row in rows),
            references=list(references),
            observed=self.run.policy.observes,
        )


def _batch_fields(result: StepResult) -> dict[str, Any]:
    """The fields of an event about the batches of a step, with the rows of the data if known."""
    rows = [batch.rows for batch in result.batches if batch.rows]
    return {"batches": [list(batch) for batch in result.batches], "rows": rows or None}


def _alerting_causes(rules: Iterable[RuleConfig]) -> Cause:
    """The causes on which a rule alerts at their first step."""
    found = Cause(0)
    for rule in rules:
        at_first_step = not rule.sustained and rule.consecutive == 1 and rule.within == 0
        if at_first_step and rule.action & Action.ALERT:
            found |= Cause(rule.causes)
    return found
