"""`IncidentMonitor`: turns the records of a step into events and an order to the host.

An alarm is a step with a cause. Alarms that follow one another closely are one incident. An alert
reports a fault about which nothing may be decided yet.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from healcore.console import is_logged, is_power_of_ten
from healcore.core.decision import LASTING, Action, Cause, names_of
from healcore.core.engine.incident import incident_causes
from healcore.core.step_record import StepRecord, Why
from healcore.history import Counts
from healcore.history.run_history import MAX_ALARMS
from healcore.runtime.faults.failures import Severity, failures_of
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.journal import IncidentRecord
from healcore.runtime.run.trouble import Trouble, TroubleCause
from healcore.runtime.run_options import Hooks, IncidentContext

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

_ORDERS = Action.STOP | Action.ROLLBACK | Action.SAVE
"""Actions that the host carries out; the engine cuts the rate, and an alert is only an event."""
_MIN_STEPS_REMEMBERED = 1000
"""Min number of steps whose batch ids are kept; more if the policy's region is longer."""
_MIN_INTERVALS_REMEMBERED = 5
"""Min number of checkpoint intervals whose batch ids are kept. Comparisons find trouble late:
it may begin two intervals after the restored checkpoint, and last two more."""


class IncidentMonitor:
    """Fills journal and ledger, writes the events of every step and calls the hooks.

    The engine on the device judges each step by itself. The monitor sees the steps one after
    another: it knows which alarms belong to one incident, which causes are new to the reader, and
    which steps an order has to undo.

    A run may have an alarm at every step for hours. So lines become rarer with their number, and
    after `MAX_ALARMS` alarms so do events. The metrics file has all alarms. Otherwise the first
    alarms would be lost among thousands of equal lines.

    Args:
        run: the parts of the run.
        hooks: functions of the program, which may replace an order.

    Attributes:
        nonfinite_record: newest record of a step that was not finite, or None.
    """

    def __init__(self, run: Run, hooks: Hooks) -> None:
        self.run = run
        self.nonfinite_record: StepRecord | None = None
        self._hooks = hooks
        config, incident = run.policy.engine.config, run.policy.incident
        self._causes = incident_causes(config)
        several = _MIN_INTERVALS_REMEMBERED * run.schedule.every
        self._kept = max(run.policy.rollback.region, several, _MIN_STEPS_REMEMBERED)
        """Number of steps whose batch ids are kept."""
        self._newest_causes = 0
        """`Cause` flags of the newest step."""
        self._quiet_steps = int(config.incident.quiet_steps)
        """Steps without an alarm after which an incident is reported as over."""
        self._steps_without = incident.alert_steps or self._quiet_steps
        """Steps without a cause after which the cause begins again."""
        self._alerting = Cause(0)
        """The causes on which a rule alerts at their first step."""
        for rule in (*config.rules, *run.policy.host_rules):
            at_first_step = not rule.sustained and rule.consecutive == 1 and rule.within == 0
            if at_first_step and rule.action & Action.ALERT:
                self._alerting |= Cause(rule.causes)
        self._faults: Counter[str] = Counter()
        """Optimizer and cause -> how often a fault of this kind has begun."""
        self._alarms: Counter[str] = Counter()
        """Optimizer and cause -> alarms of the present fault."""

    def note_step(self, result: StepResult) -> Trouble | None:
        """Notes one step: counts it, writes its events, and asks for an action.

        Most steps have neither a cause nor an action. Such a step is only counted.

        Args:
            result: the step, with the records of all optimizers. Steps come in order.

        Returns:
            An order if the host has to save, roll back or stop, or None.
        """
        run, journal, records = self.run, self.run.journal, result.records
        alarm = journal.add(result, self._causes, self._kept)
        incident = run.ledger.add(result, alarm, is_open=journal.open)
        self._newest_causes = result.causes
        acts = any(record.cause or record.action for record in records)
        if acts:
            records = self._report_alarms(result, incident)
        run.metrics.add(result.records)
        self._report_over(result)
        for record in records:
            unread = record.judged or record.why == Why.STATE_KEPT
            if not record.taken and journal.nonfinite_streak and unread:
                self.nonfinite_record = record
        if not acts:
            return None
        return self._order(result, records, incident)

    def counts(self) -> Counts:
        """The counts of the whole run, including earlier processes.

        Incidents, rollbacks and skips of undone steps count, because they have happened. Clips and
        cuts are counted by the engines, whose states a rollback restores.
        """
        ledger, total = self.run.ledger, self.run.metrics.total
        return Counts(
            incidents=ledger.incident_count,
            rollbacks=len(ledger.rollbacks),
            skips=ledger.skips,
            clips=total("clips"),
            lr_cuts=total("lr_cuts"),
        )

    @property
    def is_unhealthy(self) -> bool:
        """Whether an incident is open, a lasting alarm is on, or the last step was unhealthy.

        The postmortem and the last line of a run report this, because the weights of such a run may
        be damaged.
        """
        journal = self.run.journal
        last_unhealthy = journal.next_step - 1 in journal.unhealthy[-1:]
        return journal.open or last_unhealthy or bool(self.lasting_causes)

    @property
    def lasting_causes(self) -> Cause:
        """Causes of the newest step that last until something changes, such as a plateau.

        They open no incident if the policy only alerts. The last line of a run names them, because
        otherwise nothing would remind the user of an alert that was logged hours before.
        """
        return Cause(self._newest_causes) & LASTING

    # -- events and lines -----------------------------------------------------------------------

    def _report_over(self, result: StepResult) -> None:
        """Writes the event of each incident that is over.

        Its engine has closed it, and `quiet_steps` steps had no alarm.
        """
        log = self.run.log
        # A step has few calls: the incidents are over in their order.
        for incident in reversed(self.run.ledger.incidents):
            if incident.reported_over:
                break
            if not incident.over or incident.last > result.index - self._quiet_steps:
                continue
            incident.reported_over = True
            record = self.run.metrics.newest(incident.engine) or result.records[0]
            say = None
            if is_logged(incident.number):
                say = log.info
            log.event(
                "over",
                step=result.index,
                say=say,
                incident=incident.number,
                onset=incident.onset,
                last=incident.last,
                engine=record.engine,
                cause=Cause(incident.cause),
                readings=record.readings,
            )

    def _report_alarms(
        self, result: StepResult, incident: IncidentRecord | None
    ) -> list[StepRecord]:
        """Writes the events of a step with a cause, and at most one line.

        A fault is one cause in one optimizer, until `quiet_steps` steps, or the policy's own
        `alert_steps`, had no alarm with it. The first ten faults of a kind, then each power of two,
        have a line and an alert at their first alarm, and a line at each power of ten. The first
        alarm of an incident, as after a rollback, and a cut of the learning rate have a line too.
        After `MAX_ALARMS` alarms a fault has events only with an action or a line.

        Returns:
            The records of the step, with the action ALERT where an alerted fault begins.
        """
        records: list[StepRecord] = []
        last_alarms, lead = self.run.ledger.last_alarms, -1
        is_first = incident is not None and incident.alarms == 1
        alerts: list[Cause | None] = []
        for place, record in enumerate(result.records):
            begins, few, may_alert, has_line = Cause(0), False, False, False
            for name in names_of(record.cause):
                fault = f"{record.engine}/{name}"
                since = result.index - last_alarms.get(fault, -self._steps_without - 1)
                last_alarms[fault] = result.index
                if since > self._steps_without:
                    begins |= Cause[name] & self._alerting
                    self._faults[fault] += 1
                    self._alarms[fault] = 0
                self._alarms[fault] += 1
                alarms = self._alarms[fault]
                few |= alarms <= MAX_ALARMS
                if is_logged(self._faults[fault]):
                    may_alert = True
                    has_line |= is_first or is_power_of_ten(alarms)
            action = Action(record.action)
            alert = begins
            if action & Action.ALERT and not begins:  # a rule about several steps
                alert = Cause(record.cause)
            if begins:
                action |= Action.ALERT
            if not may_alert:
                alert = Cause(0)
            has_line |= bool(alert)
            has_line |= bool(action & Action.CUT_LR) and not self.run.policy.observes
            if has_line and (lead < 0 or records[lead].taken):  # a skipped step first
                lead = place
            records.append(record._replace(action=action))
            if record.cause and (few or has_line or action):
                alerts.append(alert)
            else:
                alerts.append(None)
        for place, (record, alert) in enumerate(zip(records, alerts, strict=True)):
            if alert is not None:
                self._write(result, record, alert, incident, is_lead=place == lead)
        return records

    def _write(
        self,
        result: StepResult,
        record: StepRecord,
        alert: Cause,
        incident: IncidentRecord | None,
        *,
        is_lead: bool,
    ) -> None:
        """Writes the event of an alarm, and its line if `is_lead`.

        Collective at the first alarm of an incident.
        """
        run, log, observes, of_ranks = self.run, self.run.log, self.run.policy.observes, None
        if incident and incident.alarms == 1 and record.rank_signals and run.ranks.world > 1:
            of_ranks = [
                {"rank": rank, "loss": loss, "grad_norm": norm}
                for rank, (loss, norm) in enumerate(run.ranks.gather(record.rank_signals))
            ]
        failures, page = failures_of(alert), failures_of(record.cause)[0]
        references = dict.fromkeys(each for row in failures for each in row.references)
        severity = say = why = skips = grad_scale = lr_scale_before = None
        if failures:
            severity = failures[0].severity
        if is_lead:
            say = log.warning
            if page.severity is Severity.ERROR:
                say = log.error
        if record.by_optimizer:
            why = "the optimizer made NaN or Inf of a finite gradient"
            if record.lr is not None and not math.isfinite(record.lr):
                why = f"learning rate {record.lr:g}; {why}"
        if not record.taken and not observes:
            skips = run.ledger.skips
        if not run.policy.engine.per_tensor:
            grad_scale = record.grad_scale
        if record.action & Action.CUT_LR:
            lr_scale_before = run.metrics.scale_of(record.engine)
        number = 0
        if incident is not None:
            number = incident.number
        log.event(
            "alarm",
            step=result.index,
            say=say,
            engine=record.engine,
            incident=number,
            cause=record.cause,
            skip=not record.taken,
            skips=skips,
            grad_scale=grad_scale,
            lr=record.lr,
            lr_scale_before=lr_scale_before,
            lr_scale=record.lr_scale,
            action=record.action,
            readings=record.readings,
            evidence=record.evidence,
            why=why,
            observed=observes,
            batches=[list(batch) for batch in result.batches],
            rows=[batch.rows for batch in result.batches if batch.rows] or None,
            of_ranks=of_ranks,
            alert=alert or None,
            severity=severity,
            diagnosis=" ".join(row.diagnosis for row in failures) or None,
            references=list(references) or None,
        )
        if say is not None:
            log.name_page(page.name, say)

    # -- orders ---------------------------------------------------------------------------------

    def _order(
        self, result: StepResult, records: list[StepRecord], incident: IncidentRecord | None
    ) -> Trouble | None:
        """Makes an order of the actions of a step, after the hooks and all ranks (collective).

        With several optimizers the order has the actions of all, and the deeper rollback.

        Returns None if the policy only observes, or if the host has nothing to do.
        """
        run, journal = self.run, self.run.journal
        onset = since = result.index
        if incident is not None:
            onset = incident.onset
            if incident.only_skips:
                # A finite step within the incident shows that the weights were finite at this step.
                onset = journal.first_consecutive(result.index)
        ordered = action = Action(0)
        flags, depth = Cause(0), 1
        for record in records:
            if record.action:
                ordered |= Action(record.action)
                flags |= Cause(record.cause)
                depth = max(depth, record.rollback_depth)
                action |= self._ask_hooks(result, record, onset, incident)
        if not ordered:
            return None
        # Takes the union of the ranks' actions, because hooks may differ between ranks.
        for of_rank, depth_of_rank in run.ranks.gather((int(action), depth)):
            action |= Action(of_rank)
            depth = max(depth, depth_of_rank)
        if run.policy.observes or not action & _ORDERS:
            return None
        if incident is not None:
            # The first steps of the causes in this incident.
            firsts = [incident.first[name] for name in names_of(flags & Cause(incident.cause))]
            since = max(min(firsts, default=onset), onset)
        cause = TroubleCause.RULE
        if action & ~ordered & (Action.ROLLBACK | Action.STOP):
            cause = TroubleCause.HOOK
        return Trouble(
            cause=cause,
            onset=onset,
            found_at=result.index,
            since=since,
            action=int(action),
            flags=int(flags),
            depth=depth,
            batches=tuple(journal.batches_between(since, result.index)),
        )

    def _ask_hooks(
        self,
        result: StepResult,
        record: StepRecord,
        onset: int,
        incident: IncidentRecord | None,
    ) -> Action:
        """Calls the hooks and logs their results. Returns the actions to take."""
        if not len(self._hooks):
            return Action(record.action)
        number = 0
        if incident is not None:
            number = incident.number
        context = IncidentContext(
            number,
            result.index,
            onset,
            record.cause,
            record.decision,
            record.readings,
            record.engine,
            record.evidence,
            tuple((batch.epoch, batch.index) for batch in result.batches),
        )
        answer, log = self._hooks.run(context), self.run.log
        for problem in answer.problems:
            log.event("hook", step=result.index, hook="", problem=problem)
        if answer.action is None or self.run.policy.observes:
            return Action(record.action)
        log.event(
            "hook",
            step=result.index,
            hook=answer.hook,
            ordered=record.action,
            action=answer.action,
        )
        return answer.action
