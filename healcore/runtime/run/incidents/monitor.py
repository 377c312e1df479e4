"""`IncidentMonitor`: turns the records of a step into events and an order to the host."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from healcore.core.decision import LASTING, Action, Cause, names_of
from healcore.core.engine.incident import incident_causes
from healcore.core.step_record import StepRecord, Why
from healcore.history import Counts
from healcore.runtime.data import BatchId
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.incidents.alarms import Alarms
from healcore.runtime.run.incidents.metrics import RunMetrics
from healcore.runtime.run.ledger import IncidentRecord
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

    Args:
        run: the parts of the run.
        hooks: functions of the program, which may replace an order.

    Attributes:
        metrics: the metrics of the newest step, and counts since the run began.
        nonfinite_record: newest record of a step that was not finite, or None.
    """

    def __init__(self, run: Run, hooks: Hooks) -> None:
        self.run = run
        self.metrics = RunMetrics(run)
        self.nonfinite_record: StepRecord | None = None
        self._hooks = hooks
        self._causes = incident_causes(run.policy.engine.config)
        several = _MIN_INTERVALS_REMEMBERED * run.schedule.every
        self._kept = max(run.policy.rollback.region, several, _MIN_STEPS_REMEMBERED)
        """Number of steps whose batch ids are kept."""
        self._alarms = Alarms(run)
        self._newest_causes = 0
        """`Cause` flags of the newest step."""

    def note_step(self, result: StepResult) -> Trouble | None:
        """Notes one step: counts it, writes its events, and asks for an action.

        Most steps have neither a cause nor an action. Such a step is only counted.

        Args:
            result: the step, with the records of all optimizers. Steps come in order.

        Returns:
            An order if the host has to save, roll back or stop, or None.
        """
        run, journal, order = self.run, self.run.journal, None
        alarm = journal.add(result, self._causes, self._kept)
        incident = run.ledger.add(result, alarm, is_open=journal.open)
        self.metrics.add(result.records)
        self._alarms.report_over(result)
        self._newest_causes = result.causes
        records = result.records
        if any(record.cause or record.action for record in records):
            records = self._alarms.report(result, incident)
        for record in records:
            unread = record.judged or record.why == Why.STATE_KEPT
            if not record.taken and journal.nonfinite_streak and unread:
                self.nonfinite_record = record
            run.rate_log.add(record)
            if record.action:
                order = _merge(order, self._order(result, record, incident))
        return order

    def counts(self) -> Counts:
        """The counts of the whole run, including earlier processes.

        Incidents, rollbacks and skips of undone steps count, because they have happened. Clips and
        cuts are counted by the engines, whose states a rollback restores.
        """
        ledger = self.run.ledger
        total = self.metrics.total
        return Counts(
            incidents=ledger.incident_count,
            rollbacks=len(ledger.rollbacks),
            skips=ledger.skips,
            clips=total("clips"),
            lr_cuts=total("lr_cuts"),
            dropped=self.run.journal.dropped,
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
        engines = self.run.driver.engines()
        self.run.rate_log.read(engines)
        self.metrics.set_counts(engines)

    # -- orders ---------------------------------------------------------------------------------

    def _order(
        self, result: StepResult, record: StepRecord, incident: IncidentRecord | None
    ) -> Trouble | None:
        """Makes an order of the actions of a record, after the hooks and all ranks (collective).

        Returns None if the policy only observes, or if the host has nothing to do.
        """
        run, journal = self.run, self.run.journal
        onset = result.index
        firsts: list[int] = []  # first steps of the causes in this incident
        if incident is not None:
            onset = incident.onset
            firsts = [
                incident.first[name] for name in names_of(Cause(record.cause & incident.cause))
            ]
            if incident.only_skips:
                # A finite step within the incident shows that the weights were finite at this step.
                onset = journal.first_consecutive(result.index)
        action = Action(record.action)
        if len(self._hooks):
            action = self._ask_hooks(result, record, onset, incident)
        # Takes the union of the ranks' actions, because hooks may differ between ranks.
        depth = 1
        for of_rank, depth_of_rank in run.ranks.gather((int(action), record.rollback_depth)):
            action |= Action(of_rank)
            depth = max(depth, depth_of_rank)
        if run.policy.observes or not action & _ORDERS:
            return None
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
            depth=depth,
            batches=tuple(journal.batches_between(first, result.index)),
        )

    def _ask_hooks(
        self,
        result: StepResult,
        record: StepRecord,
        onset: int,
        incident: IncidentRecord | None,
    ) -> Action:
        """Calls the hooks and logs their results. Returns the actions to take."""
        context = IncidentContext(
            0 if incident is None else incident.number,
            result.index,
            onset,
            record.cause,
            record.decision,
            record.readings,
            record.engine,
            record.evidence,
            tuple((batch.epoch, batch.index) for batch in result.batches),
        )
        answer = self._hooks.run(context)
        for problem in answer.problems:
            self.run.log.event("hook", step=result.index, hook="", problem=problem)
        if answer.action is None or self.run.policy.observes:
            return Action(record.action)
        self.run.log.event(
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
