"""`Alarms`: the events and console lines of alarms, alerts and incidents.

An alarm is a step with a cause. Alarms that follow one another closely are one incident. An alert
reports a fault about which nothing may be decided yet.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from healcore.console import fitted, is_logged, passes_power_of_ten
from healcore.core.decision import Action, Cause, names_of
from healcore.core.engine.config import RuleConfig
from healcore.core.step_record import StepRecord
from healcore.events.kinds import sentence
from healcore.history.incidents import MAX_ALARMS
from healcore.runtime.faults.failures import Severity, failures_of
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.ledger import IncidentRecord

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


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
        """Number of an incident, and causes, of the alerts so far."""
        self._faults: Counter[str] = Counter()
        """Engine and cause -> alerts about it outside of incidents."""
        self._outside = 0
        """Number of steps with an alarm outside of incidents."""

    def report_over(self, result: StepResult) -> None:
        """Writes the event of each incident that is over.

        Its engine has closed it, and `quiet_steps` steps had no alarm.

        Args:
            result: the newest step.
        """
        newest_first = reversed(self.run.ledger.incidents)
        # A step has few calls: the incidents are over in their order.
        for incident in itertools.takewhile(lambda each: not each.reported_over, newest_first):
            if not incident.over or incident.last > result.index - self._quiet_steps:
                continue
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
                self.run.log.info(fitted(f"step {result.index}: {sentence(event)}"))

    def report(self, result: StepResult, incident: IncidentRecord | None) -> list[StepRecord]:
        """Writes the events of a step with a cause, and at most one line, see `_has_line`.

        Args:
            result: the step.
            incident: the incident that the step belongs to, or None.

        Returns:
            The records of the step, with the action ALERT where a cause begins.
        """
        records: list[StepRecord] = []
        alerts: list[Cause] = []
        for record in result.records:
            alert = Cause(record.cause if record.action & Action.ALERT else 0)
            alert |= self._begins(result.index, record)
            action = Action(record.action) | (Action.ALERT if alert else 0)
            records.append(record._replace(action=action))
            alerts.append(alert)
        lead = max(records, key=_priority)
        has_line = self._has_line(records, alerts, lead, incident)
        for record, alert in zip(records, alerts, strict=True):
            if record.cause:
                self._write(result, record, alert, incident, lead if has_line else None)
        return records

    def _begins(self, index: int, record: StepRecord) -> Cause:
        """The causes of a record that begin, and on which a rule alerts.

        A cause begins if `quiet_steps` steps, or the policy's own `alert_steps`, had no alarm with
        it.
        """
        begins, last_alarms = Cause(0), self.run.ledger.last_alarms
        for name in names_of(record.cause):
            key = f"{record.engine}/{name}"
            if index - last_alarms.get(key, -self._steps_without - 1) > self._steps_without:
                begins |= Cause[name]
            last_alarms[key] = index
        return begins & self._alerting

    def _has_line(
        self,
        records: list[StepRecord],
        alerts: list[Cause],
        lead: StepRecord,
        incident: IncidentRecord | None,
    ) -> bool:
        """Whether a step has a line, which is about the record `lead`. Call it once for each step.

        - Every cut of the learning rate.
        - In the first ten incidents, then in each whose number is a power of two: the first alarm,
          then each power of ten.
        - Outside of incidents: the first alarm, then each power of ten; and the first ten alerts of
          each optimizer and cause, then each power of two.
        """
        cuts = bool(lead.action & Action.CUT_LR) and not self.run.policy.observes
        if incident is not None:
            tenth = passes_power_of_ten(incident.alarms - 1, incident.alarms)
            return cuts or (tenth and is_logged(incident.number))
        has_line = cuts
        for record, alert in zip(records, alerts, strict=True):
            for name in names_of(alert):
                fault = f"{record.engine}/{name}"
                self._faults[fault] += 1
                has_line |= self._reports_all or is_logged(self._faults[fault])
        if lead.cause:
            self._outside += 1
            has_line |= passes_power_of_ten(self._outside - 1, self._outside)
        return has_line

    def _write(
        self,
        result: StepResult,
        record: StepRecord,
        alert: Cause,
        incident: IncidentRecord | None,
        lead: StepRecord | None,
    ) -> None:
        """Writes the event of an alarm, and its line. Collective at the first alarm of an incident.

        An alert is reported once per incident and cause, outside of incidents if the step has a
        line. Later alarms than `MAX_ALARMS` have an event only with an action or a line.

        Args:
            result: the step.
            record: a record with a cause.
            alert: the causes on which a rule alerts.
            incident: the incident of the step, or None.
            lead: the record that has the line of the step, or None without a line.
        """
        number, alarms, of_ranks = 0, self._outside, None
        run, observes = self.run, self.run.policy.observes
        if incident is not None:
            number, alarms = incident.number, incident.alarms
            if alarms == 1 and record.rank_signals is not None and run.ranks.world > 1:
                of_ranks = []
                for rank, (loss, norm) in enumerate(run.ranks.gather(record.rank_signals)):
                    of_ranks.append({"rank": rank, "loss": loss, "grad_norm": norm})
        if alarms > MAX_ALARMS and lead is None and not record.action:
            return
        is_new = (number, alert) not in self._alerted if number else lead is not None
        if not (is_new or self._reports_all):
            alert = Cause(0)
        self._alerted.add((number, alert))
        failures = failures_of(alert)
        references = dict.fromkeys(each for row in failures for each in row.references)
        rows = [batch.rows for batch in result.batches if batch.rows]
        cuts = record.action & Action.CUT_LR
        event = run.log.event(
            "alarm",
            step=result.index,
            engine=record.engine,
            incident=number,
            cause=record.cause,
            skip=not record.taken,
            skips=None if record.taken or observes else run.ledger.skips,
            grad_scale=None if run.policy.engine.per_tensor else record.grad_scale,
            lr=record.lr,
            lr_scale_before=run.rate_log.scale_of(record.engine) if cuts else None,
            lr_scale=record.lr_scale,
            action=record.action,
            readings=record.readings,
            evidence=record.evidence,
            why="the optimizer made NaN or Inf of a finite gradient"
            if record.by_optimizer
            else None,
            observed=observes,
            of_ranks=of_ranks,
            batches=[list(batch) for batch in result.batches],
            rows=rows or None,
            alert=alert or None,
            severity=failures[0].severity if failures else None,
            diagnosis=" ".join(row.diagnosis for row in failures) or None,
            references=list(references) or None,
        )
        if record is lead:
            failure = failures_of(record.cause)[0]
            write = run.log.warning
            if failure.severity is Severity.ERROR:
                write = run.log.error
            which = f"incident {number}: " if number else ""
            write(fitted(f"step {result.index}: {which}{sentence(event)}"))
            run.log.name_page(failure.name, write)


def _priority(record: StepRecord) -> tuple[bool, bool, bool, bool]:
    """Sort key: with several optimizers, the line is about the record with the largest key.

    A cut of the learning rate matters most, then a skipped step, then an alert, then any other
    cause.
    """
    cuts, alerts = (bool(record.action & flag) for flag in (Action.CUT_LR, Action.ALERT))
    return cuts, not record.taken, alerts, record.cause != 0


def _alerting_causes(rules: Iterable[RuleConfig]) -> Cause:
    """The causes on which a rule alerts at their first step."""
    found = Cause(0)
    for rule in rules:
        at_first_step = not rule.sustained and rule.consecutive == 1 and rule.within == 0
        if at_first_step and rule.action & Action.ALERT:
            found |= Cause(rule.causes)
    return found
