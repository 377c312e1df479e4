"""What a rollback needs and what it changes: evidence of damage, a budget, the rate or the data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from healcore.core.verdict import NONFINITE, Action, Cause, names
from healcore.runtime.dominance.dominance import Verdict
from healcore.runtime.driver import Driver
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.ledger import Ledger
from healcore.runtime.incidents.rollback import Rollback, Status
from healcore.runtime.incidents.step_lines import cause_text, passes_power_of_ten
from healcore.runtime.run_log import RunLog
from healcore.runtime.store.ranks import Ranks


class Evidence:
    """Whether an order is carried out.

    Under a policy with `[rollback] confirm` an order needs evidence that the model is worse.
    Weights that are not finite are evidence. Without a `loss_fn` a long incident of steps that are
    not finite is evidence, too. All other evidence comes from `dominance`, which needs a `loss_fn`.

    `compares` says whether current and earlier weights are compared.
    """

    def __init__(
        self,
        policy: HostPolicy,
        driver: Driver,
        ranks: Ranks,
        ledger: Ledger,
        log: RunLog,
        *,
        compares: bool,
    ) -> None:
        self._policy = policy
        self._driver = driver
        self._ranks = ranks
        self._ledger = ledger
        self._log = log
        self._compares = compares
        self._declined: Counter[str] = Counter()
        """Reason -> orders declined; trouble that lasts brings an order every few steps."""

    @property
    def declined(self) -> int:
        """Orders declined in this process."""
        return self._declined.total()

    def needed(self, order: Rollback) -> bool:
        """Whether an order needs evidence. Exceptions: `forced`, and a rule that stops."""
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

    def found(self, order: Rollback, step: int) -> bool:
        """Whether the model is known to be worse without a comparison; declines the order if not.

        `step` is the step that the run is at.
        """
        if not self.finite():
            self._assess(order, step, "damage", "weights")
            return True
        if self._compares:
            self.decline(order, step, "nothing", "the current weights are not shown to be worse")
            return False
        if order.cause & NONFINITE and self._nonfinite_lasts(order):
            self._assess(order, step, "damage", "repetition")
            return True
        why = "cannot tell without loss_fn whether the model is worse"
        if order.cause & NONFINITE:
            why = "the weights are finite"
        self.decline(order, step, "nothing", why)
        return False

    def _nonfinite_lasts(self, order: Rollback) -> bool:
        """Whether the incident has lasted for `probation` steps; finite weights may overflow too.

        After this time a checkpoint from within the incident could become known-good.
        """
        incident = self._ledger.last_incident
        return incident is not None and order.index - incident.onset >= self._policy.probation

    def _assess(self, order: Rollback, step: int, verdict: str, by: str) -> None:
        cause = names(Cause(order.cause))
        self._log.event(
            "assessment", step=step, onset=order.onset, cause=cause, verdict=verdict, by=by
        )

    def decline(self, order: Rollback, step: int, by: str, why: str) -> None:
        """Declines an order, and logs that the run continues without it."""
        order.status = Status.DECLINED
        self._assess(order, step, "unknown", by)
        self._declined[why] += 1
        times = self._declined[why]
        if passes_power_of_ten(times - 1, times):
            again = f" ({times} times so far)" if times > 1 else ""
            cause = cause_text(Cause(order.cause))
            self._log.info(f"step {order.index}: {cause}: {why}; the run continues{again}")

    def exhausted(self, order: Rollback) -> str:
        """Reason why no further rollback is granted, or an empty string.

        The engine's budget is refunded by healthy steps, and repeated steps are healthy too; a
        hook's rollbacks use no budget. So this counts the rollbacks for the same trouble.
        """
        reach = max(self._policy.refund_after, 1)
        near = len(self._ledger.same_trouble(order.onset, reach))
        if near < max(self._policy.recoveries, 1):
            return ""
        return f"{near} rollbacks have been made within {reach} steps of the run"


class Change(NamedTuple):
    """What is changed; at most one of the two."""

    lr_at_fault: float | None = None
    """Learning rate that has caused the trouble, NaN if it is unknown, or None if no rate has."""
    skip: tuple[int, int] | None = None
    """First and last step whose batches are skipped, or None if no batch is."""


def change(
    verdict: Verdict,
    past: Sequence[Rollback],
    *,
    factor: float,
    first_step: int,
    may_limit: bool,
    can_rewind: bool,
) -> Change:
    """What a run changes when it repeats the steps of a damage: the first that applies.

    * The earlier weights find the batches of the trouble unusual: the run skips these batches.
    * The earlier weights are the first of the run, or the learning rate is far above the rate at
      the earlier weights: the rate is at fault.
    * The trouble is new: nothing, because damage may have no cause in the run.
    * Nothing has been changed for it yet: the rate, if it is unknown or above the rate at the
      earlier weights, otherwise the data. The run skips all batches since the earlier weights, and
      at the end of the data all that are left.
    * One of the two has been changed: the other one.

    Args:
        verdict: of the comparison.
        past: earlier rollbacks for the same trouble, the newest last.
        factor: a rate above 1/factor of the healthy rate is at fault.
        first_step: step of the run's first weights.
        may_limit: whether the learning rate may be limited; otherwise it is never at fault.
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
