"""NaN or Inf that a save has found in the state: what the policy says about it.

Asked before the next save, whatever a disk is at, so that the answer follows from the steps.
Moments, or statistics that the forward pass writes, may be damaged while loss and gradients look
well. No detector sees that, and every checkpoint from then on is bad.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from typing import NamedTuple

from healcore.core.verdict import Action, Cause, names
from healcore.runtime.checkpoints.manager import CheckpointManager
from healcore.runtime.driver import Driver
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.judge import Judge, Order
from healcore.runtime.store.ranks import Ranks

_ACTIONS = {"alert": Action.ALERT, "rollback": Action.ROLLBACK, "stop": Action.STOP}


class _Left(NamedTuple):
    """A branch that was given up for it."""

    onset: int
    arrays: tuple[str, ...]


class StateCheck:
    """Makes the order.

    Args:
        policy: the policy.
        driver: the live state.
        checkpoints: of the run.
        judge: knows the data of each step.
        ranks: the processes of this run.
        log_event: writes an event, see `Log.write`.
        warn: writes an event, and a warning to the console log.
    """

    def __init__(
        self,
        *,
        policy: HostPolicy,
        driver: Driver,
        checkpoints: CheckpointManager,
        judge: Judge,
        ranks: Ranks,
        log_event: Callable[..., object],
        warn: Callable[[str], object],
    ) -> None:
        self._policy = policy
        self._driver = driver
        self._checkpoints = checkpoints
        self._judge = judge
        self._ranks = ranks
        self._log_event = log_event
        self._warn = warn
        self._known: set[int] = set()
        self._left: list[_Left] = []

    def order(self, step: int) -> Order | None:
        """What is to be done about the saves so far; None: nothing, or nothing new.

        Args:
            step: steps done. On every rank together.
        """
        found = self._checkpoints.found_not_finite()
        fresh = found.keys() - self._known
        self._known |= found.keys()
        policy = self._policy
        if not fresh or (policy.observes and len(found) > len(fresh)):
            return None  # where nothing is changed, the first bad save says it all
        order = self._order(found, step, _ACTIONS[policy.nonfinite_state])
        serious = order.action & (Action.ROLLBACK | Action.STOP)
        if serious and self._harmless(order):
            self._warn(
                f"{', '.join(order.arrays[:3])} went NaN or Inf again after the run had gone back, "
                "without any alarm and with finite weights: it goes on as it is. If that is meant, "
                "name them in nonfinite_ok; without, no checkpoint can be known-good"
            )
            return None
        self._log_event(
            "order",
            step=step,
            cause=names(order.cause),
            action=names(order.action),
            why=f"checkpoint {min(found)} has NaN or Inf in {', '.join(order.arrays[:10])}",
            observed=policy.observes,
        )
        return None if policy.observes or not serious else order

    def went_back(self, order: Order | None) -> None:
        """The saves after the checkpoint are quarantined."""
        self._known.clear()
        if order is not None:
            self._left.append(_Left(order.onset, order.arrays))

    def _order(self, found: Mapping[int, tuple[str, ...]], step: int, action: Action) -> Order:
        first = min(found)
        since = self._checkpoints.catalog.finite_before(first)
        bad = self._unhealthy(since, first) or list(range(since, first))
        return Order(
            action=action,
            depth=1,
            onset=max(first - 1, 0),  # the state after that step is bad
            since=since,
            index=step - 1,
            cause=Cause(0),
            bad=self._judge.data_of(bad),
            overridden=True,
            loss=float("nan"),
            arrays=found[first],
        )

    def _unhealthy(self, since: int, until: int) -> list[int]:
        steps = self._judge.ledger.unhealthy
        return steps[bisect.bisect_left(steps, since) : bisect.bisect_left(steps, until)]

    def _harmless(self, order: Order) -> bool:
        """Whether going back has been tried, and nothing but the arrays themselves looks ill."""
        region = self._policy.region
        again = any(
            abs(order.onset - past.onset) < region and {*order.arrays} <= {*past.arrays}
            for past in self._left
        )
        well = not self._unhealthy(order.since, order.index + 1)
        finite = all(self._ranks.gather(self._driver.finite()))
        return again and well and finite
