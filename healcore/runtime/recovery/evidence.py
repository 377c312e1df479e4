"""Decides whether an order is carried out, and what a rollback changes: the rate or the data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from healcore.core.verdict import NONFINITE, Action, Cause, names
from healcore.runtime.dominance.dominance import Dominance, Verdict
from healcore.runtime.driver import Driver
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.ledger import Ledger
from healcore.runtime.incidents.rollback import Rollback, Status
from healcore.runtime.incidents.step_lines import cause_text, passes_power_of_ten
from healcore.runtime.run_log import RunLog
from healcore.runtime.store.ranks import Ranks


class Evidence:
    """Decides whether an order is carried out.

    Under a policy with `[rollback] confirm` an order needs evidence that the model is worse.
    Non-finite weights and statistics are evidence. Without a `loss_fn` a long incident of
    non-finite steps is evidence, too. All other evidence comes from `dominance`, which needs a
    `loss_fn`.
    """

    def __init__(
        self,
        policy: HostPolicy,
        driver: Driver,
        ranks: Ranks,
        ledger: Ledger,
        log: RunLog,
        dominance: Dominance,
    ) -> None:
        self._policy = policy
        self._driver = driver
        self._ranks = ranks
        self._ledger = ledger
        self._log = log
        self._dominance = dominance
        self._declined: Counter[str] = Counter()
        """Reason -> declined orders, to log lasting trouble only now and then."""

    @property
    def declined(self) -> int:
        """Number of declined orders in this process."""
        return self._declined.total()

    def needed(self, order: Rollback) -> bool:
        """Whether an order needs evidence. A `forced` order and a rule that stops need none."""
        if not self._policy.confirm or order.forced:
            return False
        stops = any(
            rule.action & Action.STOP and rule.causes & order.cause
            for rule in self._policy.engine.config.rules
        )
        return bool(order.action & (Action.ROLLBACK | Action.STOP)) and not stops

    def finite(self) -> bool:
        """Whether the weights are finite on every rank. Collective."""
        return all(self._ranks.gather(self._driver.finite()))

    def found(self, order: Rollback, *, damaged: bool) -> bool:
        """Whether evidence without a comparison shows that the model is worse.

        Declines the order without such evidence. `damaged`: the state has NaN or Inf.
        """
        if damaged:
            self._assess(order, "damage", "weights" if not self.finite() else "state")
            return True
        if self._dominance.is_enabled:
            self.decline(order, "nothing", "no comparison shows that the weights are worse")
            return False
        if order.cause & NONFINITE and self._nonfinite_persists(order):
            self._assess(order, "damage", "repetition")
            return True
        why = "healcore cannot tell without loss_fn whether the model is worse"
        if order.cause & NONFINITE:
            why = "the weights are finite"
        self.decline(order, "nothing", why)
        return False

    def _nonfinite_persists(self, order: Rollback) -> bool:
        """Whether the incident has lasted `probation` steps, although the weights are finite.

        After this time a checkpoint from within the incident could become known-good.
        """
        incident = self._ledger.last_incident
        return incident is not None and order.index - incident.onset >= self._policy.probation

    def _assess(self, order: Rollback, verdict: str, by: str) -> None:
        cause = names(Cause(order.cause))
        self._log.event(
            "assessment", step=order.index, onset=order.onset, cause=cause, verdict=verdict, by=by
        )

    def decline(self, order: Rollback, by: str, why: str) -> None:
        """Declines an order, and logs that the run continues without it."""
        order.status = Status.DECLINED
        self._assess(order, "unknown", by)
        self._declined[why] += 1
        times = self._declined[why]
        if passes_power_of_ten(times - 1, times):
            again = f" ({times} times so far)" if times > 1 else ""
            cause = cause_text(Cause(order.cause))
            self._log.info(f"step {order.index}: {cause}: {why}, therefore no rollback{again}")

    def exhausted(self, order: Rollback) -> str:
        """Reason why no further rollback is granted, or an empty string.

        This limit counts rollbacks for the same trouble. The engine's budget does not suffice:
        healthy repeated steps refund it, and rollbacks by a hook do not use it.
        """
        reach = max(self._policy.refund_after, 1)
        count = len(self._ledger.same_trouble(order.onset, reach))
        if count < max(self._policy.recoveries, 1):
            return ""
        return f"{count} rollbacks have been made within {reach} steps of the run"


class Change(NamedTuple):
    """Change when a run repeats steps: of the learning rate, of the data, or neither."""

    lr_at_fault: float | None = None
    """Learning rate that caused the trouble, NaN if this rate is unknown, or None for no limit."""
    skip: tuple[int, int] | None = None
    """First and last step whose batches are skipped, or None to skip no batch."""


def change(
    verdict: Verdict,
    past: Sequence[Rollback],
    *,
    factor: float,
    first_step: int,
    may_limit: bool,
    can_rewind: bool,
) -> Change:
    """Chooses what a run changes when it repeats damaged steps, by the first rule that applies.

    * The earlier weights have unusual losses on the batches of the trouble: skip these batches.
    * The earlier weights are the first of the run, or the learning rate is far above the rate at
      the earlier weights: limit the rate.
    * The trouble is new: change nothing, because damage may have no cause in the run.
    * Earlier rollbacks have changed nothing: limit the rate if it is unknown or above the rate at
      the earlier weights. Otherwise skip all batches since the earlier weights, at the end of the
      data including the remaining batches.
    * The last rollback has changed the rate or the data: change the other one.

    Args:
        verdict: verdict of the comparison.
        past: earlier rollbacks for the same trouble, the newest last.
        factor: a rate above 1/factor of the healthy rate is at fault.
        first_step: step of the run's first weights.
        may_limit: whether the learning rate may be limited.
        can_rewind: whether batches can be skipped.
    """
    if not verdict.data_ordinary:
        return Change(skip=(verdict.onset, verdict.found))
    healthy = verdict.healthy_rate
    first, highest = next(iter(verdict.rates), math.nan), max(verdict.rates, default=math.nan)
    if may_limit:
        if verdict.anchor <= first_step:
            return Change(lr_at_fault=first)
        if healthy and highest * factor > healthy:
            return Change(lr_at_fault=highest)
    if not past:
        return Change()
    raised = not healthy or not highest <= healthy
    rate = past[-1].changed == "data" or (not past[-1].changed and raised)
    if may_limit and (rate or not can_rewind):
        return Change(lr_at_fault=first)
    at_end = verdict.index < verdict.due
    return Change(skip=(verdict.anchor, verdict.index if at_end else verdict.found))
