"""`IncidentMonitor`: turns the records of a step into events and an order to the host."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, NamedTuple

from healcore.console import is_logged, passes_power_of_ten
from healcore.core.decision import LASTING, NONFINITE, Action, Cause, StepRecord, names
from healcore.core.engine.incidents import incident_causes
from healcore.core.engine.state import RuleConfig
from healcore.events.schema import sentence
from healcore.history.run import MOST_ALARMS, Counts
from healcore.runtime.data import BatchId
from healcore.runtime.driver import Rates
from healcore.runtime.faults.failures import Severity, failures_of
from healcore.runtime.run.metrics import RunMetrics
from healcore.runtime.run.orders import Order
from healcore.runtime.run.run_record import IncidentRecord
from healcore.runtime.run.steps import StepResult
from healcore.runtime.run_options import Hooks, IncidentContext
from healcore.runtime.story import diagnosis
from healcore.runtime.story.program_clip import ProgramClip

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

_ORDERS = Action.STOP | Action.ROLLBACK | Action.SAVE
"""Actions that the host carries out; the engine cuts the rate, and an alert is only an event."""
_MIN_STEPS_REMEMBERED = 1000
"""Min number of steps whose batch ids are kept; more if the policy's region is longer."""
_MIN_INTERVALS_REMEMBERED = 5
"""Min number of checkpoint intervals whose batch ids are kept. Comparisons find trouble late:
it may begin two intervals after the restored checkpoint, and last two more."""


class _Judged(NamedTuple):
    """A record of a step, and the incident of the step or None."""

    step: StepResult
    record: StepRecord
    incident: IncidentRecord | None
    alert: Cause = Cause(0)
    """Causes of an alert, or 0 without one."""

    @property
    def number(self) -> int:
        """Number of the incident, or 0."""
        return self.incident.number if self.incident else 0


class IncidentMonitor:
    """Fills the ledger, writes the events of every step and calls the hooks.

    Attributes:
        state: what a checkpoint holds.
        nonfinite_record: newest record of a step that was not finite, or None.
    """

    def __init__(self, run: Run, hooks: Hooks) -> None:
        self.run, self.hooks = run, hooks
        config = self.run.policy.engine.config
        self._causes = incident_causes(config)
        self._quiet_steps = int(config.incident.quiet_steps)
        self._alert_steps = self.run.policy.incident.alert_steps
        """Steps without a cause after which it is alerted again, or 0 for `quiet_steps`."""
        per_tensor, observes = self.run.policy.engine.per_tensor, self.run.policy.observes
        self.metrics = RunMetrics(per_tensor=per_tensor, observes=observes)
        self.state = run.record.monitor
        self.nonfinite_record: StepRecord | None = None
        several = _MIN_INTERVALS_REMEMBERED * run.schedule.every
        self._kept = max(self.run.policy.rollback.region, several, _MIN_STEPS_REMEMBERED)
        self.lr_scales: dict[str, float] = {}  # by engine name, as far as they are known
        self._alarms_outside = 0
        self._unclosed: list[IncidentRecord] = []
        """Incidents without an event `over`."""
        self._newest_causes = 0
        """`Cause` flags of the newest step."""
        self._explained: set[str] = set()
        """Diagnoses on the console so far."""
        self._alerts: set[tuple[int, Cause]] = set()
        """Number of an incident, and causes, of the events `alert` within incidents."""
        self._alerting = _alerting_causes((*config.rules, *self.run.policy.rules))
        self._faults: Counter[str] = Counter()
        """Name of a cause -> steps with an alert about it outside of incidents."""
        self._program_clips: defaultdict[str, ProgramClip] = defaultdict(ProgramClip)
        """Engine -> whether the program clips its gradients itself."""
        self._highest: dict[str, float] = {}
        """Engine -> the highest loss of an alert outside of incidents that had a line."""

    def continue_incidents(self) -> None:
        """Continues the incidents of an earlier process, after its ledger was read."""
        incidents = self.run.ledger.incidents
        self._unclosed = [each for each in incidents if not each.reported_over]

    def process(self, step: StepResult) -> Order | None:
        """Processes one step. Returns an order if the host has to act, or None."""
        records = step.records
        order = None
        self.state.add_batches(step.index, step.batches, kept=self._kept)
        self._count_nonfinite(step)
        incident = self.run.ledger.add_step(step.index, records, self._causes)
        has_trained = is_judged = False
        for record in records:
            is_judged |= record.judged
            has_trained |= record.judged and not record.skip
        if has_trained:
            self.state.last_trained = step.index
        self.state.has_micro_steps |= not is_judged
        begins = incident is not None and incident.alarms == 1
        if incident is not None and begins:
            self._begin(incident, step)
        self.metrics.add(records)
        if self._unclosed:
            self._report_over(step)
        for record in records:
            if record.judged and not record.skip:
                line = self._program_clips[record.engine].add(record.grad_norm)
                if line:
                    self.run.log.warning(f"step {step.index}: {line}")
        if not any(record.cause or record.action for record in records):
            self._newest_causes = 0
            for record in records:
                self._log_lr_change(step.index, record)
            return None
        self._newest_causes = reduce(or_, (int(record.cause) for record in records), 0)
        judged = [_Judged(step, record, incident) for record in records]
        if self._newest_causes:
            judged = [self._with_alert(each) for each in judged]
        lead = max(judged, key=_weight)
        # Alerts come with a cause. Most steps have none, and cost nothing here.
        has_line = bool(lead.record.cause) and (
            self._has_alert_to_log(judged) or self._has_line(lead, begins=begins)
        )
        for result in judged:
            if result.record.cause:
                self._log_alarm(result, has_line=has_line and result is lead)
            self._log_lr_change(step.index, result.record)
            if result.record.action:
                order = _merge(order, self._order(result, has_line=has_line))
        return order

    def _with_alert(self, judged: _Judged) -> _Judged:
        """Adds the causes of the step's alert, and orders an alert on a cause that begins.

        The engine orders an alert once per rule. A rule names several causes, and one of them may
        last for the rest of the run. A cause begins if `quiet_steps` steps, or the policy's own
        `alert_steps`, had no alarm with it.
        """
        record, index = judged.record, judged.step.index
        last, begins = self.run.ledger.last_alarms, Cause(0)
        for name in names(record.cause):
            key = f"{record.engine}/{name}"
            gap = self._alert_steps or self._quiet_steps
            if index - last.get(key, -gap - 1) > gap:
                begins |= Cause[name]
            last[key] = index
        if record.action & Action.ALERT:
            return judged._replace(alert=Cause(record.cause))
        begins &= self._alerting
        if not begins:
            return judged
        record = record._replace(action=Action(record.action) | Action.ALERT)
        return judged._replace(record=record, alert=begins)

    def counts(self) -> Counts:
        """Counts of the whole run."""
        ledger, total = self.run.ledger, self.metrics.total
        return Counts(
            incidents=ledger.incident_count,
            rollbacks=len(ledger.rollbacks),
            skips=ledger.skips,
            clips=total("clips"),
            lr_cuts=total("lr_cuts"),
        )

    @property
    def is_unhealthy(self) -> bool:
        """Whether an incident is open, a lasting alarm is on, or the last step was unhealthy."""
        ledger = self.run.ledger
        last_unhealthy = ledger.next_step - 1 in ledger.unhealthy[-1:]
        return ledger.open or last_unhealthy or bool(self.lasting_causes)

    @property
    def lasting_causes(self) -> Cause:
        """Lasting causes of the newest step; they open no incident if the policy only alerts."""
        return Cause(self._newest_causes) & LASTING

    # -- batches --------------------------------------------------------------------------------

    @staticmethod
    def batches_of_alarms(later: list[StepResult]) -> list[BatchId]:
        """Batches of the steps after an order, up to the last step with an alarm."""
        alarms = [i for i, step in enumerate(later) if any(record.cause for record in step.records)]
        last = max(alarms, default=-1)
        return [batch for step in later[: last + 1] for batch in step.batches]

    # -- the learning rate ----------------------------------------------------------------------

    def read_engines(self) -> None:
        """Sets multipliers and counts from the engines' states, without an event."""
        engines = self.run.driver.engines()
        self.lr_scales = {name: saved["state"]["lr"]["scale"] for name, saved in engines.items()}
        self.metrics.set(engines)

    @property
    def lr_scale(self) -> float:
        """The learning-rate multiplier, the smallest of all engines."""
        return min(self.lr_scales.values(), default=1.0)

    def rates_in_force(self) -> Rates:
        """Engine name -> last step's learning rate with the multiplier, None if it is unknown."""
        rates = self.run.driver.trained_rates().items()
        return {name: rate and rate * self.lr_scales.get(name, 1.0) for name, rate in rates}

    def _log_lr_change(self, index: int, record: StepRecord) -> None:
        """Writes an event for each cut, and when the multiplier leaves 1 or returns to 1.

        Other changes have no event: the multiplier may change at every step of a ramp, and while
        the schedule is above a limit.
        """
        now, before = record.lr_scale, self.lr_scales.get(record.engine, 1.0)
        if now == before and not record.action:
            return
        self.lr_scales[record.engine] = now
        cut = bool(record.action & Action.CUT_LR)
        if cut and now < before:
            why = "the policy cuts it"
        elif now < before == 1.0:
            why = "the schedule has risen above the limit of the last cut"
        elif before < now == 1.0:
            why = "the limit of the last cut has ended"
        else:
            return
        self.run.log.event(
            "lr",
            step=index,
            engine=record.engine,
            action=Action.CUT_LR if cut else None,
            lr_scale_before=before,
            lr_scale=now,
            why=why,
            observed=self.run.policy.observes,
        )

    # -- incidents and alarms -------------------------------------------------------------------

    def _count_nonfinite(self, step: StepResult) -> None:
        """Counts a step of which every optimizer had a NaN or Inf, or which was not taken."""
        state = self.state
        if state.nonfinite_streak < 0:  # also of a checkpoint that another program has saved
            state.never_finite = self.run.ledger.untrained >= step.index
            state.nonfinite_streak = step.index if state.never_finite else 0
        last_counted = None
        for record in step.records:
            if record.judged and not (record.cause and record.cause & NONFINITE):
                state.nonfinite_streak, state.never_finite = 0, False
                return
            if record.judged or not record.taken:
                last_counted = record
        if last_counted is not None:
            state.nonfinite_streak += 1
            self.nonfinite_record = last_counted

    def _begin(self, incident: IncidentRecord, step: StepResult) -> None:
        """Writes the event of a new incident, with the values of each rank (collective)."""
        self._unclosed.append(incident)
        first = max(step.records, key=lambda record: record.cause != 0)
        of_ranks = None
        if first.rank_signals is not None and self.run.ranks.world > 1:
            values = enumerate(self.run.ranks.gather(first.rank_signals))
            of_ranks = [{"rank": r, "loss": loss, "grad_norm": norm} for r, (loss, norm) in values]
        self.run.log.event(
            "incident",
            step=step.index,
            incident=incident.number,
            onset=incident.onset,
            cause=Cause(incident.cause),
            of_ranks=of_ranks,
            **_data_of(step),
        )

    def _report_over(self, step: StepResult) -> None:
        """Writes an event for each incident after which the run was quiet for long enough."""
        newest = step.index - self._quiet_steps
        if not all(incident.over and incident.last <= newest for incident in self._unclosed):
            return
        begun, self._unclosed = self._unclosed, []
        for incident in begun:
            incident.reported_over = True
            event = self.run.log.event(
                "over",
                step=step.index,
                incident=incident.number,
                onset=incident.onset,
                last=incident.last,
                cause=Cause(incident.cause),
                readings=step.records[0].readings,
            )
            if is_logged(incident.number):
                self.run.log.info(f"step {step.index}: {sentence(event)}")

    def _has_line(self, lead: _Judged, *, begins: bool) -> bool:
        """Whether the step has a console line, which is about one of its records.

        - Every cut of the learning rate.
        - Incidents: the first ten, then each power of two.
        - Skipped steps, and alarms outside of incidents (such as a clipped outlier): the first,
          then each power of ten.

        For alerts outside of incidents see `_has_alert_to_log`.
        """
        incident = lead.incident
        records = lead.step.records
        skips = self.run.ledger.skips
        outside = self._alarms_outside
        new = 0 if incident is not None else sum(record.cause != 0 for record in records)
        return (
            (bool(lead.record.action & Action.CUT_LR) and not self.run.policy.observes)
            or (incident is not None and begins and is_logged(incident.number))
            or passes_power_of_ten(skips - any(record.skip for record in records), skips)
            or passes_power_of_ten(outside, outside + new)
        )

    def _has_alert_to_log(self, judged: list[_Judged]) -> bool:
        """Whether a step has an alert outside of incidents that has a console line.

        Such an alert reports a fault about which nothing is decided yet. There is one per fault,
        after `quiet_steps` steps without its cause. The first ten faults of each cause have a line,
        then each power of two; also the first of each optimizer, and one with twice the highest
        loss of earlier lines.
        """
        alerts = [each for each in judged if each.incident is None and each.alert]
        if not alerts:
            return False
        new = names(reduce(or_, (each.alert for each in alerts)))
        self._faults.update(new)
        records, highest = [each.record for each in alerts], self._highest
        higher = any(
            each.engine not in highest or each.loss >= 2 * highest[each.engine] > 0
            for each in records
        )
        counted = self._alert_steps or any(is_logged(self._faults[name]) for name in new)
        if not (higher or counted):
            return False
        for each in records:
            highest[each.engine] = max(each.loss, highest.get(each.engine, each.loss))
        return True

    def _rate_of(self, record: StepRecord) -> float | None:
        """The learning rate of a step, or None if it is unknown.

        The program may have set another rate since that step, for example the usual rate after a
        step at a wrong one.
        """
        if record.lr not in (0.0, 1.0):
            return float(record.lr)
        with suppress(RuntimeError):  # a step in JAX that failed may have donated the state
            return self.run.driver.trained_rates().get(record.engine)
        return None

    def _log_alarm(self, judged: _Judged, *, has_line: bool) -> None:
        step, record, incident = judged[:3]
        policy = self.run.policy
        self._alarms_outside += incident is None
        number = incident.alarms if incident else self._alarms_outside
        if number == MOST_ALARMS + 1 and incident is None:
            self.run.log.info(
                f"step {step.index}: more than {MOST_ALARMS} alarms outside of incidents: from now "
                "on only those with an alert or a line have an event; the metrics file has them all"
            )
        if number > MOST_ALARMS and not has_line and not judged.alert:
            return
        rate = None
        if has_line:
            rate = self._rate_of(record)
        explanation = failures_of(record.cause)[0].diagnosis
        by_optimizer = None
        if record.by_optimizer:
            numbers: list[str] = []
            with suppress(RuntimeError):  # as in `_rate_of`
                numbers = self.run.driver.suspect_numbers()
            explanation = by_optimizer = diagnosis.by_optimizer_text(numbers)
        event = self.run.log.event(
            "alarm",
            step=step.index,
            engine=record.engine,
            incident=judged.number,
            cause=record.cause,
            skip=record.skip,
            skips=self.run.ledger.skips if record.skip and not policy.observes else None,
            grad_scale=None if policy.engine.per_tensor else record.grad_scale,
            lr=rate,
            lr_scale=record.lr_scale,
            action=record.action,
            readings=record.readings,
            evidence=record.evidence,
            diagnosis=by_optimizer,
            observed=policy.observes,
            **_data_of(step),
        )
        if has_line:
            which = f"incident {incident.number}: " if incident else ""
            line = f"step {step.index}: {which}{sentence(event)}"
            is_error = failures_of(record.cause)[0].severity is Severity.ERROR
            if is_error and explanation not in self._explained:
                self._explained.add(explanation)
                line += f". {explanation}"
            (self.run.log.error if is_error else self.run.log.warning)(line)

    # -- orders ---------------------------------------------------------------------------------

    def _order(self, judged: _Judged, *, has_line: bool) -> Order | None:
        step, record, incident = judged[:3]
        onset, first = (incident.onset, incident.first) if incident else (step.index, {})
        if incident and incident.only_skips:
            # A finite step within the incident shows that the weights were finite at this step.
            onset = self.run.ledger.first_consecutive(step.index)
        action = record.action
        if len(self.hooks):
            action = self._ask_hooks(judged, onset)
        # Takes the union of the ranks' actions, because hooks may differ between ranks.
        of_ranks = self.run.ranks.gather((int(action), record.rollback_depth))
        action = Action(reduce(or_, (flags for flags, _ in of_ranks)))
        depth = max(depth for _, depth in of_ranks)
        if action & Action.ALERT:
            self._alert(judged, action, has_line=has_line)
        if self.run.policy.observes or action & ~(Action.ALERT | Action.CUT_LR):
            self.run.log.event(
                "order",
                step=step.index,
                incident=judged.number,
                cause=record.cause,
                action=action,
                depth=depth,
                observed=self.run.policy.observes,
            )
        if self.run.policy.observes or not action & _ORDERS:
            return None
        since = min([first[name] for name in names(record.cause) if name in first], default=onset)
        since = max(since, onset)
        return Order(
            index=step.index,
            onset=onset,
            since=since,
            action=int(action),
            cause=int(record.cause),
            depth=max(depth, 1),
            batches=tuple(self.state.batches_between(since, step.index)),
            by_host=bool(action & ~record.action & (Action.ROLLBACK | Action.STOP)),
        )

    def _ask_hooks(self, judged: _Judged, onset: int) -> Action:
        """Calls the hooks and logs their results. Returns the actions to take."""
        step, record, _ = judged[:3]
        batches = tuple((batch.epoch, batch.index) for batch in step.batches)
        about = record.cause, record.decision, record.readings, record.engine, record.evidence
        context = IncidentContext(judged.number, step.index, onset, *about, batches)
        action, hook, problems = self.hooks.run(context)
        for problem in problems:
            self.run.log.event("hook", step=step.index, hook="", problem=problem)
        if action is None or self.run.policy.observes:
            return record.action
        ordered = record.action
        self.run.log.event("hook", step=step.index, hook=hook, ordered=ordered, action=action)
        return action

    def _alert(self, judged: _Judged, action: Action, *, has_line: bool) -> None:
        """Writes the event of an alert: once per incident and cause, else if it has a line."""
        cause = judged.alert or Cause(judged.record.cause)  # a hook may alert too
        key = judged.number, cause
        again = bool(self._alert_steps and judged.alert)
        if not again and (key in self._alerts if judged.number else not has_line):
            return
        self._alerts.add(key)
        rows = failures_of(cause)
        self.run.log.event(
            "alert",
            step=judged.step.index,
            incident=judged.number,
            engine=judged.record.engine,
            cause=cause,
            action=action,
            severity=rows[0].severity,
            diagnosis=" ".join(row.diagnosis for row in rows),
            references=list(dict.fromkeys(each for row in rows for each in row.references)),
            observed=self.run.policy.observes,
        )


def _alerting_causes(rules: Iterable[RuleConfig]) -> Cause:
    """The causes on which a rule alerts at their first step."""
    found = Cause(0)
    for rule in rules:
        at_once = (rule.sustained, rule.consecutive, rule.within) == (False, 1, 0)
        if at_once and rule.action & Action.ALERT:
            found |= Cause(rule.causes)
    return found


def _data_of(step: StepResult) -> dict[str, Any]:
    """The fields of an event about the batches of a step."""
    rows = [batch.rows for batch in step.batches if batch.rows]
    return {"batches": [list(batch) for batch in step.batches], "rows": rows or None}


_CUT, _ALERT = int(Action.CUT_LR), int(Action.ALERT)


def _weight(judged: _Judged) -> tuple[bool, bool, bool, bool]:
    """Sort key: with several optimizers, the line is about the record with the largest key."""
    record = judged.record
    action = int(record.action)  # flags of an int are faster than those of an enum
    cut, alert = bool(action & _CUT), bool(action & _ALERT)
    return cut, bool(record.skip), alert, record.cause != 0


def _merge(one: Order | None, other: Order | None) -> Order | None:
    if one is None or other is None:
        return one or other
    return replace(
        one,
        action=one.action | other.action,
        depth=max(one.depth, other.depth),
        since=min(one.since, other.since),
        batches=max(one.batches, other.batches, key=len),
        cause=one.cause | other.cause,
        by_host=one.by_host or other.by_host,
    )
