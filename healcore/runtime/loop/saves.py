"""When a run saves, and what follows from NaN or Inf that a save has found."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from healcore.core.verdict import Action, names
from healcore.runtime.checkpoints.manager import CheckpointManager
from healcore.runtime.driver import Driver
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.recovery.ledger import Ledger
from healcore.runtime.recovery.monitor import IncidentMonitor
from healcore.runtime.recovery.restoring import Restorer
from healcore.runtime.recovery.rollback import Rollback
from healcore.runtime.run_log import RunLog
from healcore.runtime.store import StoreError
from healcore.runtime.store.ranks import Ranks

RECENT_ALARM = 2
"""Steps after an alarm in which no checkpoint is saved: an incident may begin with it."""
_ACTIONS = {"alert": Action.ALERT, "rollback": Action.ROLLBACK, "stop": Action.STOP}


@dataclass(eq=False, kw_only=True)
class SaveSchedule:
    """When a run saves: regularly, at its start and at its end."""

    driver: Driver
    checkpoints: CheckpointManager
    restorer: Restorer
    ledger: Ledger
    observes: bool
    log: RunLog

    def __post_init__(self) -> None:
        self._steps = 0
        """Steps since the last call of `due`; a dispatch may have several."""
        self._overdue = 0
        """Step at which a save became due that has not been taken yet; 0: none."""
        self._saved = -1
        """Step of the last checkpoint, or that the run started or resumed from."""
        self._newest = -1
        """The same, restart points included."""

    def count(self, steps: int) -> None:
        """Counts steps; a negative number corrects an earlier count."""
        self._steps += steps

    def reset(self, step: int) -> None:
        """Restarts the count: the state is that of the checkpoint of `step`, or the initial one."""
        self._saved, self._newest, self._overdue, self._steps = step, step, 0, 0

    def due(self, step: int) -> bool:
        """Whether a save is due and possible; called once per dispatch."""
        steps, self._steps = self._steps, 0
        if self.checkpoints.due(step, steps):
            self._overdue = self._overdue or step
        return bool(self._overdue) and self.alarm_free(step) and self.driver.may_save()

    def restart_due(self, step: int) -> bool:
        """Whether a restart point is due and possible: only of a state that nothing speaks against.

        A restart resumes from it, and it has passed no probation.
        """
        due = self.checkpoints.restart_points.due(step, self._newest)
        return due and not self.ledger.open and not self._alarmed(step) and self.driver.may_save()

    def save_for_restart(self, step: int) -> None:
        """Saves a restart point, if one is still due now that all steps are read."""
        if self.restart_due(step):
            self._newest = step  # also if it is left out: the next one is due later
            self.checkpoints.save_for_restart(step, *self.restorer.contents(step))
            self._update_journal(step)

    def _update_journal(self, step: int) -> None:
        """Brings the journal up to date after a save."""
        if self.restorer.journal_outdated:
            self.restorer.write_journal(step)
        self.restorer.record_first_checkpoint(step)

    def alarm_free(self, step: int) -> bool:
        """Whether the last steps had no alarm, which may be the first of an incident.

        A save is delayed by at most one interval: a run with an alarm now and then has an incident
        open most of the time. A checkpoint from after an onset does no harm: a rollback quarantines
        it.
        """
        late = step - self._overdue >= self.checkpoints.every
        return not self._alarmed(step) or late or self.observes

    def _alarmed(self, step: int) -> bool:
        unhealthy = self.ledger.unhealthy
        return bool(unhealthy) and unhealthy[-1] >= step - RECENT_ALARM

    def save(self, step: int, why: str) -> None:
        """Saves a checkpoint of this step."""
        self._overdue, self._saved, self._newest = 0, step, step
        self.checkpoints.save(step, *self.restorer.contents(step), why)
        self._update_journal(step)

    def emergency_obstacle(self, step: int) -> str:
        """Why not to save before an exception ends the run; "": nothing speaks against it.

        A restart resumes from this checkpoint, which has passed no probation.
        """
        return "the last steps had an alarm" if self.ledger.open or self._alarmed(step) else ""

    def save_emergency(self, step: int, exact: Callable[[], AbstractContextManager[None]]) -> str:
        """Saves before an exception ends the run, in the context `exact`; returns why not, or "".

        See `emergency_obstacle`.
        """
        if step == self._saved:
            return ""
        try:
            with exact():
                self.save(step, "emergency")
        except StoreError as error:
            return str(error)
        return ""

    def save_if_not_finite(self, step: int) -> None:
        """Saves at the end of the data where an alarm and NaN or Inf in the weights are so recent.

        Nothing has ordered a rollback yet; the state check does, as for any other such save.
        """
        due = step != self._saved and self._alarmed(step) and self.driver.may_save()
        if due and not self.driver.finite():
            self.save(step, "last")

    def save_last(
        self, step: int, exact: Callable[[], AbstractContextManager[None]], *, completed: bool
    ) -> None:
        """Saves a checkpoint of the last step in the context `exact`, if the last one is older.

        A loop that has ended by itself has given up the gradients that no step has used. After any
        other end they would be missing in the step that follows.
        """
        if step == self._saved and not self.checkpoints.in_memory_only(step):
            return
        if not self.driver.may_save():
            lost = "its gradients are in no checkpoint"
            lost = lost if completed else f"the last checkpoint is {self._saved}"
            self.log.problem(step, f"the run ends within an accumulation: {lost}")
            if not completed:
                return
        with exact():
            self.save(step, "last")


@dataclass(eq=False, kw_only=True)
class StateCheck:
    """NaN or Inf that a save has found in the state, and what the policy does about it.

    Moments, or statistics that the forward pass writes, may be damaged while loss and gradients
    look healthy. No detector sees that, and every checkpoint from then on is bad. The check runs
    before the next save, however far the disk is behind, so that the result depends on the steps
    alone.
    """

    policy: HostPolicy
    driver: Driver
    checkpoints: CheckpointManager
    monitor: IncidentMonitor
    ranks: Ranks
    log: RunLog

    def __post_init__(self) -> None:
        self._known: set[int] = set()

    def check(self, step: int) -> Rollback | None:
        """The order for new NaN or Inf in the saves so far, or None. All ranks call it."""
        found = self.checkpoints.nonfinite_checkpoints()
        new = found.keys() - self._known
        self._known |= found.keys()
        policy = self.policy
        if not new or (policy.observes and len(found) > len(new)):
            return None  # an observing policy reports the first bad save only
        order = self._order(found, step, _ACTIONS[policy.nonfinite_state])
        serious = order.action & (Action.ROLLBACK | Action.STOP)
        if serious and self._harmless(order):
            self.log.problem(
                step,
                f"{', '.join(order.arrays[:3])} became NaN or Inf again after a rollback, "
                "without any alarm and with finite weights: the run continues. If this is "
                "expected, name them in nonfinite_ok; otherwise no checkpoint becomes known-good",
            )
            return None
        self.log.event(
            "order",
            step=step,
            cause=[],
            action=names(Action(order.action)),
            why=f"checkpoint {min(found)} has NaN or Inf in {', '.join(order.arrays[:10])}",
            observed=policy.observes,
        )
        return None if policy.observes or not serious else order

    def on_rollback(self) -> None:
        """Starts over after a rollback."""
        self._known.clear()

    def _order(self, found: Mapping[int, tuple[str, ...]], step: int, action: Action) -> Rollback:
        first = min(found)
        since = self.checkpoints.catalog.newest_finite_before(first)
        bad = self._unhealthy(since, first) or list(range(since, first))
        return Rollback(
            index=step - 1,
            onset=max(first - 1, 0),  # the state after that step is bad
            since=since,
            action=int(action),
            batches=self.monitor.batches_of(bad),
            forced=True,
            arrays=list(found[first]),
        )

    def _unhealthy(self, since: int, until: int) -> list[int]:
        steps = self.monitor.ledger.unhealthy
        return steps[bisect.bisect_left(steps, since) : bisect.bisect_left(steps, until)]

    def _harmless(self, order: Rollback) -> bool:
        """Whether a rollback has been tried, and only these arrays are not finite."""
        past = self.monitor.ledger.same_trouble(order.onset, self.policy.region)
        again = any({*order.arrays} <= {*each.arrays} for each in past)
        healthy = not self._unhealthy(order.since, order.index + 1)
        finite = all(self.ranks.gather(self.driver.finite()))
        return again and healthy and finite
