"""Decides whether an order of the policy is carried out."""

from __future__ import annotations

from collections import Counter

from healcore.core.verdict import NONFINITE, Action, Cause, names
from healcore.runtime.dominance.dominance import Dominance
from healcore.runtime.driver import Driver
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.ledger import Ledger
from healcore.runtime.incidents.rollback import Order
from healcore.runtime.incidents.step_lines import cause_text, passes_power_of_ten
from healcore.runtime.run_log import RunLog
from healcore.runtime.store.ranks import Ranks


class Evidence:
    """Decides whether an order is carried out.

    Under a policy with `[rollback] confirm` an order needs evidence that the model is worse.
    Non-finite weights and statistics are evidence. All other evidence comes from `dominance`, which
    needs a `loss_fn`. Finite weights are never rolled back without it: a step with NaN is skipped.
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

    def needed(self, order: Order) -> bool:
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

    def found(self, order: Order, *, damaged: bool) -> bool:
        """Whether evidence without a comparison shows that the model is worse.

        Declines the order without such evidence. `damaged`: the state has NaN or Inf.
        """
        if damaged:
            self._assess(order, "damage", "weights" if not self.finite() else "state")
            return True
        if self._dominance.is_enabled:
            self.decline(order, "nothing", "no comparison shows that the weights are worse")
            return False
        why = "healcore cannot tell without loss_fn whether the model is worse"
        if order.cause & NONFINITE:
            why = "the weights are finite"
        self.decline(order, "nothing", why)
        return False

    def _assess(self, order: Order, verdict: str, by: str) -> None:
        cause = names(Cause(order.cause))
        self._log.event(
            "assessment", step=order.index, onset=order.onset, cause=cause, verdict=verdict, by=by
        )

    def decline(self, order: Order, by: str, why: str) -> None:
        """Declines an order, and logs that the run continues without it."""
        self._assess(order, "unknown", by)
        self._declined[why] += 1
        times = self._declined[why]
        if passes_power_of_ten(times - 1, times):
            again = f" ({times} times so far)" if times > 1 else ""
            cause = cause_text(Cause(order.cause))
            self._log.info(f"step {order.index}: {cause}: {why}, therefore no rollback{again}")

    def exhausted(self, order: Order) -> str:
        """Reason why no further rollback is granted, or an empty string.

        This limit counts rollbacks for the same trouble. The engine's budget does not suffice:
        healthy repeated steps refund it, and rollbacks by a hook do not use it.
        """
        reach = max(self._policy.refund_after, 1)
        count = len(self._ledger.same_trouble(order.onset, reach))
        if count < max(self._policy.recoveries, 1):
            return ""
        return f"{count} rollbacks have been made within {reach} steps of the run"
