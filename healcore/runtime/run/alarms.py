"""What the log says of alarms.

`AlarmLog` writes the events and console lines of the alarms of a run. `Alerts` decides which causes
are alerted: an alert reports a fault about which nothing may be decided yet. Both read a
`JudgedRecord`, which is a record of a step with what the host adds to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, NamedTuple

from healcore.console import is_logged, passes_power_of_ten
from healcore.core.decision import NONFINITE, Action, Cause, names_of
from healcore.core.engine.config import RuleConfig
from healcore.core.step_record import StepRecord
from healcore.events.schema import sentence
from healcore.history.incidents import MAX_ALARMS
from healcore.runtime.driver import Driver
from healcore.runtime.faults.failures import Severity, failures_of
from healcore.runtime.reporting.nonfinite_steps import by_optimizer_text
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.bad_rows import BadRows
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.rate_jumps import RateJumps
from healcore.runtime.run_options import HostPolicy

if TYPE_CHECKING:
    from healcore.runtime.run.run_record import IncidentRecord, Ledger

# Flags of an int are faster than flags of an enum.
_CUT_LR = int(Action.CUT_LR)
_ALERT = int(Action.ALERT)


class JudgedRecord(NamedTuple):
    """A record of a step that has a cause or an action, and the incident of the step.

    Alarms and alerts are logged from these objects: an event needs the record and also the step and
    the incident that it belongs to.
    """

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

        Returns:
            Four flags in the order of their importance.
        """
        action = int(self.record.action)
        cuts = bool(action & _CUT_LR)
        alerts = bool(action & _ALERT)
        return cuts, bool(self.record.skip), alerts, self.record.cause != 0


def batch_fields(result: StepResult) -> dict[str, Any]:
    """The fields of an event about the batches of a step.

    Args:
        result: the step. Its loaders may give the row numbers of a batch; most give none.
    """
    batches: list[list[Any]] = []
    rows: list[Any] = []
    for batch in result.batches:
        batches.append(list(batch))
        if batch.rows:
            rows.append(batch.rows)
    return {"batches": batches, "rows": rows or None}


class Alerts:
    """Decides which causes are alerted, and which alerts have an event and a line.

    The engine orders an alert once per rule. A rule names several causes, and one of them may last
    for the rest of the run and hide the start of another one. So the host alerts each cause when it
    begins. On the other hand a cause that comes and goes must not fill the log: see
    `count_and_decide_line`.

    Args:
        policy: its rules alert, and it may set `alert_steps`.
        log: the log, for the event of an alert.
        ledger: has the last alarm of each cause.
    """

    def __init__(self, *, policy: HostPolicy, log: RunLog, ledger: Ledger) -> None:
        self._policy = policy
        self._log = log
        self._ledger = ledger
        config = policy.engine.config
        self._steps_without = int(config.incident.quiet_steps)
        """Steps without a cause after which the cause begins again."""
        self._has_own_steps = bool(policy.incident.alert_steps)
        """Whether the policy sets `alert_steps` itself. `_steps_without` is then that number, and
        every alert is reported."""
        if self._has_own_steps:
            self._steps_without = policy.incident.alert_steps
        self._alerting = _alerting_causes((*config.rules, *policy.host_rules))
        self._written: set[tuple[int, Cause]] = set()
        """Number of an incident, and causes, of the events `alert` so far."""
        self._faults: Counter[str] = Counter()
        """Name of a cause -> steps with an alert about it outside of incidents."""
        self._highest: dict[str, float] = {}
        """Engine -> the highest loss of an alert outside of incidents that had a line."""

    def with_alert(self, judged: JudgedRecord) -> JudgedRecord:
        """Adds the causes of the step's alert, and orders an alert on a cause that begins.

        A cause begins if `quiet_steps` steps, or the policy's own `alert_steps`, had no alarm with
        it.

        Args:
            judged: a record of the newest step.

        Returns:
            The record, with `alert` and the action ALERT if there is an alert.
        """
        record = judged.record
        index = judged.result.index
        last_alarms = self._ledger.last_alarms
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

    def count_and_decide_line(self, judged: list[JudgedRecord]) -> bool:
        """Counts the faults of a step, and decides whether it has a console line about an alert.

        Only alerts outside of incidents count. Such an alert reports a fault about which nothing is
        decided yet. There is one per fault, after `quiet_steps` steps without its cause. The first
        ten faults of each cause have a line, then each power of two; also the first of each
        optimizer, and one with twice the highest loss of earlier lines.

        Args:
            judged: the records of one step. Call this once for each step.

        Returns:
            Whether the step has the line.
        """
        causes: list[Cause] = []
        records: list[StepRecord] = []
        for each in judged:
            if each.incident is None and each.alert:
                causes.append(each.alert)
                records.append(each.record)
        if not records:
            return False
        new = names_of(reduce(or_, causes))
        self._faults.update(new)
        highest = self._highest
        has_line = self._has_own_steps or any(is_logged(self._faults[name]) for name in new)
        for record in records:
            if record.engine not in highest or record.loss >= 2 * highest[record.engine] > 0:
                has_line = True
        if has_line:
            for record in records:
                earlier = highest.get(record.engine, record.loss)
                highest[record.engine] = max(record.loss, earlier)
        return has_line

    def write(self, judged: JudgedRecord, action: Action, *, has_line: bool) -> None:
        """Writes the event of an alert: once per incident and cause, else if it has a line.

        Args:
            judged: the record of the alert.
            action: the actions of the step on all ranks.
            has_line: whether the step has a console line.
        """
        cause = judged.alert or Cause(judged.record.cause)  # a hook may alert too
        key = judged.number, cause
        if not (self._has_own_steps and judged.alert):
            if judged.number and key in self._written:
                return
            if not judged.number and not has_line:
                return
        self._written.add(key)
        rows = failures_of(cause)
        references: dict[str, None] = {}  # in order, each once
        for row in rows:
            references |= dict.fromkeys(row.references)
        self._log.event(
            "alert",
            step=judged.result.index,
            incident=judged.number,
            engine=judged.record.engine,
            cause=cause,
            action=action,
            severity=rows[0].severity,
            diagnosis=" ".join(row.diagnosis for row in rows),
            references=list(references),
            observed=self._policy.observes,
        )


def _alerting_causes(rules: Iterable[RuleConfig]) -> Cause:
    """The causes on which a rule alerts at their first step."""
    found = Cause(0)
    for rule in rules:
        at_first_step = not rule.sustained and rule.consecutive == 1 and rule.within == 0
        if at_first_step and rule.action & Action.ALERT:
            found |= Cause(rule.causes)
    return found


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

    Attributes:
        alerts: decides about the alerts of the same steps.
        rate_jumps: is told the learning rate of every step.
    """

    def __init__(self, *, policy: HostPolicy, log: RunLog, ledger: Ledger, driver: Driver) -> None:
        self._policy = policy
        self._log = log
        self._ledger = ledger
        self._driver = driver
        self.alerts = Alerts(policy=policy, log=log, ledger=ledger)
        self.rate_jumps = RateJumps()
        self._bad_rows = BadRows()
        self._outside = 0  # alarms outside of incidents
        self._explained: set[str] = set()
        """Diagnoses on the console so far: a line has each of them once."""

    def has_line(self, judged: list[JudgedRecord], lead: JudgedRecord) -> bool:
        """Whether a step has a console line, which is about one of its records.

        - Every cut of the learning rate.
        - Incidents: the first ten, then each power of two.
        - Skipped steps, and alarms outside of incidents (such as a clipped outlier): the first,
          then each power of ten.
        - Alerts outside of incidents: see `Alerts.count_and_decide_line`.

        Args:
            judged: the records of the step. Call this once for each step, because alerts are
                counted.
            lead: the record that the line would be about.
        """
        if self.alerts.count_and_decide_line(judged):
            return True
        if lead.record.action & Action.CUT_LR and not self._policy.observes:
            return True
        incident = lead.incident
        if incident is not None and incident.alarms == 1 and is_logged(incident.number):
            return True
        alarms = 0
        has_skip = False
        for record in lead.result.records:
            alarms += record.cause != 0
            has_skip = has_skip or bool(record.skip)
        skips = self._ledger.skips
        if passes_power_of_ten(skips - has_skip, skips):
            return True
        if incident is not None:
            return False
        return passes_power_of_ten(self._outside, self._outside + alarms)

    def write(self, judged: JudgedRecord, *, has_line: bool) -> None:
        """Writes the event of an alarm, and its line.

        Args:
            judged: a record with a cause.
            has_line: whether the record has the line of its step.
        """
        result, record, incident = judged.result, judged.record, judged.incident
        policy = self._policy
        if incident is None:
            self._outside += 1
            number = self._outside
            if number == MAX_ALARMS + 1:
                self._log.info(
                    f"step {result.index}: more than {MAX_ALARMS} alarms outside of incidents: "
                    "from now on only those with an alert or a line have an event; the metrics "
                    "file has them all"
                )
        else:
            number = incident.alarms
        if number > MAX_ALARMS and not has_line and not judged.alert:
            return
        rate = rate_before = None
        if has_line:
            rate = self._rate_of(record)
            rate_before = self.rate_jumps.rate_before(result.index, record)
        explanation = failures_of(record.cause)[0].diagnosis
        by_optimizer = None
        if record.by_optimizer:
            numbers: list[str] = []
            with suppress(RuntimeError):  # as in `_rate_of`
                numbers = self._driver.suspect_numbers()
            by_optimizer = by_optimizer_text(numbers)
            explanation = by_optimizer
        skips = None
        if record.skip and not policy.observes:
            skips = self._ledger.skips
        grad_scale = None
        if not policy.engine.per_tensor:
            grad_scale = record.grad_scale
        event = self._log.event(
            "alarm",
            step=result.index,
            engine=record.engine,
            incident=judged.number,
            cause=record.cause,
            skip=record.skip,
            skips=skips,
            grad_scale=grad_scale,
            lr=rate,
            lr_before=rate_before,
            lr_scale=record.lr_scale,
            action=record.action,
            readings=record.readings,
            evidence=record.evidence,
            diagnosis=by_optimizer,
            observed=policy.observes,
            **batch_fields(result),
        )
        if has_line:
            self._write_line(judged, sentence(event), explanation)
        begins = incident is not None and incident.alarms == 1
        if begins and record.skip and record.cause & NONFINITE:
            text = self._bad_rows.add(result.batches)
            if text:
                self._log.warning(f"step {result.index}: {text}")

    def _write_line(self, judged: JudgedRecord, text: str, explanation: str) -> None:
        """Writes the console line of an alarm.

        Args:
            judged: the record of the alarm.
            text: the sentence about its event.
            explanation: the diagnosis, which the first line about an error has too.
        """
        result, record, incident = judged.result, judged.record, judged.incident
        which = ""
        if incident is not None:
            which = f"incident {incident.number}: "
        line = f"step {result.index}: {which}{text}"
        if failures_of(record.cause)[0].severity is not Severity.ERROR:
            self._log.warning(line)
            return
        if explanation not in self._explained:
            self._explained.add(explanation)
            line += f". {explanation}"
        self._log.error(line)

    def _rate_of(self, record: StepRecord) -> float | None:
        """The learning rate of a step, or None if it is unknown.

        The program may have set another rate since that step, for example the usual rate after a
        step at a wrong one.
        """
        if record.lr is not None:
            return float(record.lr)
        with suppress(RuntimeError):  # a step in JAX that failed may have donated the state
            return self._driver.trained_rates().get(record.engine)
        return None
