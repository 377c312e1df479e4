"""`IncidentMonitor`: turns the records of a step into events and an order to the host."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from healcore.core.decision import LASTING, NONFINITE, Action, Cause, names_of
from healcore.core.engine.incident import incident_causes
from healcore.core.step_record import StepRecord, Why
from healcore.history import Counts
from healcore.runtime.data import BatchId
from healcore.runtime.driver import Driver
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.incidents.alarms import AlarmLog
from healcore.runtime.run.incidents.incident_log import IncidentLog
from healcore.runtime.run.incidents.judged_record import JudgedRecord
from healcore.runtime.run.incidents.metrics import RunMetrics
from healcore.runtime.run.incidents.program_clip import ProgramClip
from healcore.runtime.run.incidents.rate_log import RateLog
from healcore.runtime.run.monitor_state import MonitorState
from healcore.runtime.run.record.ledger import IncidentRecord, Ledger
from healcore.runtime.run.trouble import Trouble, TroubleCause
from healcore.runtime.run_options import Hooks, HostPolicy, IncidentContext
from healcore.runtime.store.ranks import Ranks

_ORDERS = Action.STOP | Action.ROLLBACK | Action.SAVE
"""Actions that the host carries out; the engine cuts the rate, and an alert is only an event."""
_MIN_STEPS_REMEMBERED = 1000
"""Min number of steps whose batch ids are kept; more if the policy's region is longer."""
_MIN_INTERVALS_REMEMBERED = 5
"""Min number of checkpoint intervals whose batch ids are kept. Comparisons find trouble late:
it may begin two intervals after the restored checkpoint, and last two more."""


class IncidentMonitor:
    """Fills the ledger, writes the events of every step and calls the hooks.

    The engine on the device judges each step by itself. The monitor sees the steps one after
    another: it knows which alarms belong to one incident, which causes are new to the reader, and
    which steps an order has to undo.

    Args:
        policy: the policy of the run.
        driver: has the learning rates and the states of the engines.
        rate_log: is given the multiplier of every step.
        ranks: the ranks, which agree on an order.
        log: the log, for the events of the steps.
        ledger: is filled with the steps and their incidents.
        state: is filled with what later decisions read of earlier steps.
        hooks: functions of the program, which may replace an order.
        save_every: steps between two saves.

    Attributes:
        metrics: the metrics of the newest step, and counts since the run began.
        state: what later decisions read of earlier steps. A checkpoint holds it.
        nonfinite_record: newest record of a step that was not finite, or None.
    """

    def __init__(
        self,
        *,
        policy: HostPolicy,
        driver: Driver,
        rate_log: RateLog,
        ranks: Ranks,
        log: RunLog,
        ledger: Ledger,
        state: MonitorState,
        hooks: Hooks,
        save_every: int,
    ) -> None:
        self._policy = policy
        self._driver = driver
        self._rate_log = rate_log
        self._ranks = ranks
        self._log = log
        self._ledger = ledger
        self._hooks = hooks
        self._causes = incident_causes(policy.engine.config)
        self.metrics = RunMetrics(
            state, per_tensor=policy.engine.per_tensor, observes=policy.observes
        )
        self.state = state
        self.nonfinite_record: StepRecord | None = None
        several = _MIN_INTERVALS_REMEMBERED * save_every
        self._kept = max(policy.rollback.region, several, _MIN_STEPS_REMEMBERED)
        """Number of steps whose batch ids are kept."""
        self._alarm_log = AlarmLog(
            policy=policy, log=log, ledger=ledger, driver=driver, rate_log=rate_log
        )
        self._incident_log = IncidentLog(
            log=log,
            ledger=ledger,
            ranks=ranks,
            metrics=self.metrics,
            quiet_steps=int(policy.engine.config.incident.quiet_steps),
        )
        self._newest_causes = 0
        """`Cause` flags of the newest step."""
        self._program_clips: defaultdict[str, ProgramClip] = defaultdict(
            lambda: ProgramClip(driver.framework)
        )
        """Engine -> whether the program clips its gradients itself."""

    def continue_incidents(self) -> None:
        """Continues the incidents of an earlier process. Called after its ledger was read."""
        self._incident_log.continue_incidents()

    def note_step(self, result: StepResult) -> Trouble | None:
        """Notes one step: counts it, writes its events, and asks for an action.

        Most steps have neither a cause nor an action. Such a step is only kept.

        Args:
            result: the step, with the records of all optimizers. Steps come in order.

        Returns:
            An order if the host has to save, roll back or stop, or None.
        """
        incident = self._keep(result)
        if any(each.cause or each.action for each in result.records):
            return self._report(result, incident)
        for record in result.records:
            self._rate_log.add(result.index, record)
        return None

    def _keep(self, result: StepResult) -> IncidentRecord | None:
        """Adds a step to the state, the ledger and the metrics. Returns its incident, or None."""
        self.state.add_batches(result.index, result.batches, kept=self._kept)
        self._count_nonfinite(result)
        incident = self._ledger.add_step(result, self._causes)
        for record in result.records:
            self.state.dropped += record.why == Why.EXTERNAL
        if result.taken:
            self.state.last_trained = result.index
        elif result.why == Why.NOT_DUE:
            self.state.has_micro_steps = True
        if incident is not None and incident.alarms == 1:
            self._incident_log.begin(incident, result)
        self.metrics.add(result.records)
        self._incident_log.report_over(result)
        for record in result.records:
            if record.taken:
                line = self._program_clips[record.engine].add(record.grad_norm)
                if line:
                    self._log.warning(f"step {result.index}: {line}")
        self._newest_causes = result.causes
        return incident

    def _report(self, result: StepResult, incident: IncidentRecord | None) -> Trouble | None:
        """Writes the events of a step with a cause or an action. Returns its order, or None."""
        judged = [JudgedRecord(result, record, incident) for record in result.records]
        if result.causes:
            judged = [self._alarm_log.alerts.with_alert(each) for each in judged]
        lead = max(judged, key=JudgedRecord.priority)
        has_line = False
        if lead.record.cause:  # alerts come with a cause
            has_line = self._alarm_log.decide_line(judged, lead)
        order = None
        for each in judged:
            if each.record.cause:
                self._alarm_log.write(each, has_line=has_line and each is lead)
            self._rate_log.add(result.index, each.record)
            if each.record.action:
                order = _merge(order, self._order(each, has_line=has_line))
        return order

    def counts(self) -> Counts:
        """The counts of the whole run, including earlier processes.

        Incidents, rollbacks and skips of undone steps count, because they have happened. Clips and
        cuts are counted by the engines, whose states a rollback restores.
        """
        ledger = self._ledger
        total = self.metrics.total
        return Counts(
            incidents=ledger.incident_count,
            rollbacks=len(ledger.rollbacks),
            skips=ledger.skips,
            clips=total("clips"),
            lr_cuts=total("lr_cuts"),
            dropped=self.state.dropped,
        )

    @property
    def is_unhealthy(self) -> bool:
        """Whether an incident is open, a lasting alarm is on, or the last step was unhealthy.

        The postmortem and the last line of a run report this, because the weights of such a run may
        be damaged.
        """
        ledger = self._ledger
        last_unhealthy = ledger.next_step - 1 in ledger.unhealthy[-1:]
        return ledger.open or last_unhealthy or bool(self.lasting_causes)

    @property
    def lasting_causes(self) -> Cause:
        """Causes of the newest step that last until something changes, such as a plateau.

        They open no incident if the policy only alerts. The last line of a run names them, because
        otherwise nothing would remind the user of an alert that was logged hours before.
        """
        return Cause(self._newest_causes) & LASTING

    # -- batches --------------------------------------------------------------------------------

    @staticmethod
    def batches_of_alarms(later: list[StepResult]) -> list[BatchId]:
        """The batches of the steps after an order, up to the last step with an alarm.

        Args:
            later: the steps that were read after the order, oldest first.
        """
        found: list[BatchId] = []
        since_alarm: list[BatchId] = []
        for step in later:
            since_alarm += step.batches
            for record in step.records:
                if record.cause:
                    found += since_alarm
                    since_alarm = []
                    break
        return found

    def read_engines(self) -> None:
        """Sets multipliers and counts from the engines' states, without an event.

        Called after a start or a rollback. The states of the engines are on the host then, and hold
        values that no record has shown.
        """
        engines = self._driver.engines()
        self._rate_log.read(engines)
        self.metrics.set_counts(engines)

    # -- steps that are not finite --------------------------------------------------------------

    def _count_nonfinite(self, result: StepResult) -> None:
        """Counts a step at which every optimizer had NaN or Inf, or that kept the old state."""
        state = self.state
        last_counted = None
        for record in result.records:
            if record.judged and not (record.cause and record.cause & NONFINITE):
                state.nonfinite_streak = 0
                state.never_finite = False
                return
            if record.judged or record.why == Why.STATE_KEPT:
                last_counted = record
        if last_counted is not None:
            state.nonfinite_streak += 1
            self.nonfinite_record = last_counted

    # -- orders ---------------------------------------------------------------------------------

    def _order(self, judged: JudgedRecord, *, has_line: bool) -> Trouble | None:
        """Makes an order of the actions of a record, after the hooks and all ranks (collective).

        Returns None if the policy only observes, or if the host has nothing to do.
        """
        result, record, incident = judged.result, judged.record, judged.incident
        onset = result.index
        first_of_cause: dict[str, int] = {}
        if incident is not None:
            onset = incident.onset
            first_of_cause = incident.first
            if incident.only_skips:
                # A finite step within the incident shows that the weights were finite at this step.
                onset = self._ledger.first_consecutive(result.index)
        action = record.action
        if len(self._hooks):
            action = self._ask_hooks(judged, onset)
        # Takes the union of the ranks' actions, because hooks may differ between ranks.
        of_ranks = self._ranks.gather((int(action), record.rollback_depth))
        flags = depth = 0
        for flags_of_rank, depth_of_rank in of_ranks:
            flags |= flags_of_rank
            depth = max(depth, depth_of_rank)
        action = Action(flags)
        if action & Action.ALERT:
            self._alarm_log.alerts.write(judged, action, has_line=has_line)
        if self._policy.observes or action & ~(Action.ALERT | Action.CUT_LR):
            self._log.event(
                "order",
                step=result.index,
                incident=judged.number,
                cause=record.cause,
                action=action,
                depth=depth,
                observed=self._policy.observes,
            )
        if self._policy.observes or not action & _ORDERS:
            return None
        firsts: list[int] = []  # first steps of the causes in this incident
        for name in names_of(record.cause):
            if name in first_of_cause:
                firsts.append(first_of_cause[name])
        first = max(min(firsts, default=onset), onset)
        cause = TroubleCause.RULE
        if action & ~record.action & (Action.ROLLBACK | Action.STOP):
            cause = TroubleCause.HOOK
        return Trouble(
            cause=cause,
            onset=onset,
            found_at=result.index,
            since=first,
            action=int(action),
            flags=int(record.cause),
            depth=max(depth, 1),
            batches=tuple(self.state.batches_between(first, result.index)),
        )

    def _ask_hooks(self, judged: JudgedRecord, onset: int) -> Action:
        """Calls the hooks and logs their results. Returns the actions to take."""
        result, record = judged.result, judged.record
        batches = tuple((batch.epoch, batch.index) for batch in result.batches)
        context = IncidentContext(
            judged.number,
            result.index,
            onset,
            record.cause,
            record.decision,
            record.readings,
            record.engine,
            record.evidence,
            batches,
        )
        answer = self._hooks.run(context)
        for problem in answer.problems:
            self._log.event("hook", step=result.index, hook="", problem=problem)
        if answer.action is None or self._policy.observes:
            return record.action
        self._log.event(
            "hook",
            step=result.index,
            hook=answer.hook,
            ordered=record.action,
            action=answer.action,
        )
        return answer.action


def _merge(one: Trouble | None, other: Trouble | None) -> Trouble | None:
    """Joins the orders of two optimizers for the same step: the earlier start, the deeper depth."""
    if one is None or other is None:
        return one or other
    cause = TroubleCause.RULE
    if TroubleCause.HOOK in (one.cause, other.cause):
        cause = TroubleCause.HOOK
    return replace(
        one,
        cause=cause,
        action=one.action | other.action,
        depth=max(one.depth, other.depth),
        since=min(one.since, other.since),
        batches=max(one.batches, other.batches, key=len),
        flags=one.flags | other.flags,
    )
