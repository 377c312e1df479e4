"""`Saver`: decides when a run saves, and answers NaN and Inf that a save has found."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from healcore.core.verdict import Action, names
from healcore.runtime.checkpoints.manager import CheckpointManager
from healcore.runtime.incidents.rollback import Order
from healcore.runtime.loop.data import Data
from healcore.runtime.loop.recovery import Recovery
from healcore.runtime.recovery.restoring import Restorer
from healcore.runtime.store import StoreError
from healcore.runtime.store.claim import Claim

RECENT_ALARM_STEPS = 2
"""Steps after an alarm in which no checkpoint is saved: the alarm may begin an incident."""
_UNSAVED_INTERVALS = 3
"""Checkpoint intervals without a save after which a run warns."""
_ACTIONS = {"alert": Action.ALERT, "rollback": Action.ROLLBACK, "stop": Action.STOP}


class Saver:
    """Saves the checkpoints of a run at the start, regularly, and at the end.

    `claim` is the claim on the store's directory, or None without a directory.
    """

    def __init__(
        self, data: Data, recovery: Recovery, restorer: Restorer, claim: Claim | None
    ) -> None:
        self.restorer = restorer
        self.claim = claim
        self.checkpoints: CheckpointManager = restorer.checkpoints
        self._policy = restorer.policy
        self._driver = restorer.driver
        self._ranks = restorer.ranks
        self._log = restorer.log
        self._data = data
        self._ledger = recovery.ledger
        self._monitor = recovery.monitor
        self._dominance = recovery.dominance
        # Whether a run can resume exactly from a save at an exception.
        self._can_resume_exactly = self.checkpoints.store.durable and restorer.ranks.world == 1
        self._next_warning = _UNSAVED_INTERVALS * self.checkpoints.every
        """Number of steps without a save at which the next warning is written."""
        self._saved = -1
        """Step of the last checkpoint or of the start."""
        self._known_nonfinite: set[int] = set()

    def start(self, step: int) -> None:
        """Starts from the checkpoint of `step`, or from the initial state."""
        self.restorer.started_from = step
        self._saved = step

    def on_rollback(self, target: int) -> None:
        """Starts over at the checkpoint of `target`."""
        self._saved = target
        self._known_nonfinite.clear()

    def after_step(self) -> None:
        """Records the host's state after this step, for a save at a later exception."""
        if self._can_resume_exactly:
            self.restorer.host.after_step()

    # -- regular saves --------------------------------------------------------------------------

    def due(self) -> bool:
        """Whether a regular save is due, and possible. Called once per dispatch."""
        self._warn_if_unsaved()
        return self._intervals > 0 and self.may_save() and self._between_accumulations

    @property
    def _intervals(self) -> int:
        """Number of regular saves that were due since the last checkpoint."""
        every = self.checkpoints.every
        return self._data.step // every - self._saved // every

    def _warn_if_unsaved(self) -> None:
        """Warns if nothing was saved for three intervals, then at twice the distance each time."""
        step = self._data.step
        if step - self._saved < self._next_warning:
            return
        self._next_warning *= 2
        why = "alarms delay the save"
        if not self._between_accumulations:
            why = "an optimizer has gradients that it has not stepped with: step it, or zero_grad()"
        since = self._saved
        self._log.problem(
            step, f"no checkpoint since step {since} ({why}); a restart begins at step {since}"
        )

    def may_save(self) -> bool:
        """Whether no recent alarm, which may begin an incident, delays a regular save.

        The delay is at most one interval, because a run with occasional alarms has an incident open
        most of the time. A checkpoint after an onset does no harm: a rollback abandons it.
        """
        return not self._recent_alarm or self._intervals > 1 or self._policy.observes

    @property
    def _between_accumulations(self) -> bool:
        return self._driver.may_save(self.checkpoints.every)

    @property
    def _recent_alarm(self) -> bool:
        unhealthy = self._ledger.unhealthy
        return bool(unhealthy) and unhealthy[-1] >= self._data.step - RECENT_ALARM_STEPS

    def save(self, why: str) -> None:
        """Saves a checkpoint of this step, for the reason `why`."""
        step = self._data.step
        self._next_warning = _UNSAVED_INTERVALS * self.checkpoints.every
        self._saved = step
        self.restorer.save(step, why)
        if why in ("first", "regular"):
            self.keep_anchor()

    def keep_anchor(self) -> None:
        """Adds the current weights as an anchor, and protects the anchors' checkpoints."""
        self._dominance.keep(self._data.step, self.checkpoints.restorable)
        anchors = {each.step for each in self._dominance.anchors}
        self.checkpoints.store.ring.protected = frozenset(anchors)

    def poll(self) -> None:
        """Reports background work, and computes the known-good checkpoints."""
        self.checkpoints.poll(self._ledger)

    # -- the last state -------------------------------------------------------------------------

    def _save_if_not_finite(self) -> None:
        """Saves if an alarm and NaN or Inf in the weights are too recent for an order."""
        due = self._data.step != self._saved and self._recent_alarm and self._between_accumulations
        if due and not self._driver.finite():
            self.save("last")

    def save_last(self, *, completed: bool) -> None:
        """Saves a checkpoint of the last step, if the last checkpoint is older.

        `completed` says whether the loop has ended by itself. Then no later step needs the
        accumulated gradients, which a checkpoint does not hold.
        """
        step = self._data.step
        if step == self._saved and not self.checkpoints.is_unsaved(step):
            return
        if not self._between_accumulations:
            lost = "the gradients since the last optimizer step are not saved"
            lost = lost if completed else f"a restart resumes from step {self._saved}"
            self._log.problem(step, f"the run ends within an accumulation window: {lost}")
            if not completed:
                return
        with nullcontext() if completed else self._before_batches():
            self.save("last")

    def save_emergency(self) -> str:
        """Saves before an exception ends the run. Returns the reason if it could not, or "".

        A restart resumes from this checkpoint, which has passed no probation.
        """
        if self._ledger.open or self._recent_alarm:
            return "the last steps had an alarm"
        if not self._driver.finite():
            return "the weights are not finite"
        if self._data.step == self._saved:
            return ""
        try:
            with self._before_batches():
                self.save("emergency")
        except StoreError as error:
            return str(error)
        return ""

    @contextmanager
    def _before_batches(self) -> Iterator[None]:
        """A context in which a save holds the state directly after the last step.

        Batches that were read since then come again after a restart: the save has the loader
        positions and random states from before these batches. Raises StoreError if the changes by
        these batches cannot be undone.
        """
        loaders = self._data.loaders
        batches = {**loaders.all_unreadable(), **self._data.waiting}
        if not batches or not self._can_resume_exactly:
            yield
            return
        why_not = self._driver.undo_window()
        if why_not:
            raise StoreError(why_not)
        position = loaders.position_before(batches)
        if position is None:
            raise StoreError("the loader cannot be rewound to the first batch of the step")
        with self.restorer.host.before_batches(position):
            yield
        line = "batches that were read for the next step come again after a restart"
        self._log.event("data", step=self._data.step, outcome=line)
        self._log.info(f"step {self._data.step}: {line}")

    # -- NaN and Inf ----------------------------------------------------------------------------

    def check(self, *, at_end: bool = False) -> Order | None:
        """The order for new NaN or Inf in the saves so far, or None. Collective.

        Moments, or statistics that the forward pass writes, may be damaged while loss and gradients
        look healthy. No detector sees such damage, and every later checkpoint has it. The check
        runs before the next save, whether or not the disk is slow, so that the result depends on
        the steps only. With `at_end`, the data have ended: non-finite weights are saved first
        for this check.
        """
        if at_end:
            self._save_if_not_finite()
        nonfinite = self.checkpoints.nonfinite_checkpoints()
        new = nonfinite.keys() - self._known_nonfinite
        self._known_nonfinite |= nonfinite.keys()
        policy, step = self._policy, self._data.step
        if not new or (policy.observes and len(nonfinite) > len(new)):
            return None  # an observing policy reports the first bad save only
        first, action = min(nonfinite), _ACTIONS[policy.rollback.nonfinite_state]
        since = self.checkpoints.newest_finite_before(first)
        bad = self._unhealthy(since, first) or list(range(since, first))
        if since <= self._monitor.last_trained < bad[0]:
            bad.insert(0, self._monitor.last_trained)  # no step has been trained after the damage
        order = Order(
            index=step - 1,
            onset=max(first - 1, 0),  # the state after that step is bad
            since=since,
            action=int(action),
            batches=tuple(self._monitor.batches_of(bad)),
            forced=True,
            arrays=tuple(nonfinite[first]),
        )
        serious = action & (Action.ROLLBACK | Action.STOP)
        if serious and self._is_harmless(order):
            self._log.problem(
                step,
                f"{', '.join(order.arrays[:3])} became NaN or Inf again after a rollback, "
                "without any alarm and with finite weights: the run continues. If this is "
                "expected, name them in nonfinite_ok; otherwise no checkpoint becomes known-good",
            )
            return None
        self._log.event(
            "order",
            step=order.index,
            cause=[],
            action=names(action),
            why=f"checkpoint {first} has NaN or Inf in {', '.join(order.arrays[:10])}",
            observed=policy.observes,
        )
        return None if policy.observes or not serious else order

    def _unhealthy(self, since: int, until: int) -> list[int]:
        steps = self._ledger.unhealthy
        return steps[bisect.bisect_left(steps, since) : bisect.bisect_left(steps, until)]

    def _is_harmless(self, order: Order) -> bool:
        """Whether a rollback has not helped, without any alarm and with finite weights."""
        past = self._ledger.same_trouble(order.onset, self._policy.rollback.region)
        again = any({*order.arrays} <= {*each.arrays} for each in past)
        healthy = not self._unhealthy(order.since, order.index + 1)
        finite = all(self._ranks.gather(self._driver.finite()))
        return again and healthy and finite
