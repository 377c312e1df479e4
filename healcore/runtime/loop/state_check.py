"""NaN or Inf that a save has found in the state: what the policy does about it.

Moments, or statistics that the forward pass writes, may be damaged while loss and gradients look
healthy. No detector sees that, and every checkpoint from then on is bad. The check runs before the
next save, however far the disk is behind, so that the result depends on the steps alone.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from typing import NamedTuple

from healcore.core.verdict import Action, Cause, names
from healcore.runtime.checkpoints.manager import CheckpointManager
from healcore.runtime.driver import Driver
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.monitor import ActionRequest, IncidentMonitor
from healcore.runtime.store.ranks import Ranks

_ACTIONS = {"alert": Action.ALERT, "rollback": Action.ROLLBACK, "stop": Action.STOP}


class _NonfiniteRollback(NamedTuple):
    """A rollback for NaN or Inf in the state."""

    onset: int
    arrays: tuple[str, ...]


class StateCheck:
    """Makes the request.

    Args:
        policy: the policy.
        driver: the live state.
        checkpoints: of the run.
        monitor: knows the batches of each step.
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
        monitor: IncidentMonitor,
        ranks: Ranks,
        log_event: Callable[..., object],
        warn: Callable[[str], object],
    ) -> None:
        self._policy = policy
        self._driver = driver
        self._checkpoints = checkpoints
        self._monitor = monitor
        self._ranks = ranks
        self._log_event = log_event
        self._warn = warn
        self._known: set[int] = set()
        self._rollbacks: list[_NonfiniteRollback] = []

    def check(self, step: int) -> ActionRequest | None:
        """What to do about the saves so far; None: nothing, or nothing new. Collective.

        Args:
            step: steps done.
        """
        found = self._checkpoints.nonfinite_checkpoints()
        new = found.keys() - self._known
        self._known |= found.keys()
        policy = self._policy
        if not new or (policy.observes and len(found) > len(new)):
            return None  # an observing policy reports the first bad save only
        request = self._request(found, step, _ACTIONS[policy.nonfinite_state])
        serious = request.action & (Action.ROLLBACK | Action.STOP)
        if serious and self._harmless(request):
            self._warn(
                f"{', '.join(request.arrays[:3])} became NaN or Inf again after a rollback, "
                "without any alarm and with finite weights: the run continues. If this is "
                "expected, name them in nonfinite_ok; otherwise no checkpoint can become known-good"
            )
            return None
        self._log_event(
            "order",
            step=step,
            cause=names(request.cause),
            action=names(request.action),
            why=f"checkpoint {min(found)} has NaN or Inf in {', '.join(request.arrays[:10])}",
            observed=policy.observes,
        )
        return None if policy.observes or not serious else request

    def on_rollback(self, request: ActionRequest | None) -> None:
        """After a rollback: newer checkpoints are quarantined.

        Args:
            request: of `check`, if the rollback was for it.
        """
        self._known.clear()
        if request is not None:
            self._rollbacks.append(_NonfiniteRollback(request.onset, request.arrays))

    def _request(
        self, found: Mapping[int, tuple[str, ...]], step: int, action: Action
    ) -> ActionRequest:
        first = min(found)
        since = self._checkpoints.catalog.newest_finite_before(first)
        bad = self._unhealthy(since, first) or list(range(since, first))
        return ActionRequest(
            action=action,
            depth=1,
            onset=max(first - 1, 0),  # the state after that step is bad
            since=since,
            index=step - 1,
            cause=Cause(0),
            bad=self._monitor.batches_of(bad),
            overridden=True,
            loss=float("nan"),
            arrays=found[first],
        )

    def _unhealthy(self, since: int, until: int) -> list[int]:
        steps = self._monitor.ledger.unhealthy
        return steps[bisect.bisect_left(steps, since) : bisect.bisect_left(steps, until)]

    def _harmless(self, request: ActionRequest) -> bool:
        """Whether a rollback has been tried, and only these arrays are not finite."""
        region = self._policy.region
        again = any(
            abs(request.onset - past.onset) < region and {*request.arrays} <= {*past.arrays}
            for past in self._rollbacks
        )
        healthy = not self._unhealthy(request.since, request.index + 1)
        finite = all(self._ranks.gather(self._driver.finite()))
        return again and healthy and finite
