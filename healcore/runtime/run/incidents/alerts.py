"""`Alerts`: which causes are alerted, and which alerts have a line.

An alert reports a fault about which nothing may be decided yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from healcore.console import is_logged
from healcore.core.decision import Action, Cause, names_of
from healcore.core.engine.config import RuleConfig
from healcore.core.step_record import StepRecord
from healcore.runtime.faults.failures import failures_of
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.incidents.judged_record import JudgedRecord
from healcore.runtime.run_options import HostPolicy

if TYPE_CHECKING:
    from healcore.runtime.run.record.ledger import Ledger


class Alerts:
    """Decides which causes are alerted, and which alerts have an event and a line.

    The engine orders an alert once per rule. A rule names several causes, and one of them may last
    for the rest of the run and hide the start of another one. So the host alerts each cause when it
    begins. On the other hand a cause that comes and goes must not fill the log: see
    `decide_alert_line`.

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

    def decide_alert_line(self, judged: list[JudgedRecord]) -> bool:
        """Decides whether a step has a console line about an alert, and counts its faults.

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
