"""`HostPolicy`: the part of a policy that the host carries out, and its engine."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from healcore.core.engine import Engine, RuleConfig
from healcore.core.verdict import Action, Cause
from healcore.policy import Policy, PolicyLike, dumps
from healcore.policy.loader import resolve, with_limit
from healcore.policy.recovery import Budget, Hang, Retry, Rollback, SkipBatch


class HostPolicy(NamedTuple):
    """The engine of a policy, and the policy's values for the Healer."""

    name: str
    text: str | None  # the policy as TOML with every key, or None if the user passed an engine
    engine: Engine
    rollback: Rollback
    budget: Budget
    rules: tuple[RuleConfig, ...]  # applied by the host, see `Policy.host_rules`
    faults: Mapping[Cause, frozenset[str]]  # actions of its rule, such as "retry"
    retry: Retry
    skip_batch: SkipBatch
    hang: Hang

    @classmethod
    def of(
        cls, policy: PolicyLike, overrides: Mapping[str, Any] = {}, limit: float | None = None
    ) -> HostPolicy:
        """The host's part of a policy; with an Engine, keys of policy files have their defaults.

        `limit` is the max gradient norm of the trainer that owns the optimizer, or None.
        """
        resolved = with_limit(resolve(policy, overrides), limit)
        if isinstance(resolved, Engine):
            text, engine, config = None, resolved, resolved.config
            budget = Budget(
                recoveries=int(config.budget.recoveries),
                shrinks=0,
                refund_after=int(config.budget.refund_after),
            )
            rollback = Rollback(region=int(config.rollback.region))
            resolved = Policy(1, "(engine)", rollback=rollback, budget=budget)
        else:
            text, engine = dumps(resolved), resolved.engine()
        return cls(
            resolved.name,
            text,
            engine,
            resolved.rollback,
            resolved.budget,
            resolved.host_rules(),
            MappingProxyType(resolved.fault_actions()),
            resolved.retry,
            resolved.skip_batch,
            resolved.hang,
        )

    @property
    def rolls_back(self) -> bool:
        """Whether a rule rolls back."""
        rules = (*self.engine.config.rules, *self.rules)
        return not self.observes and any(rule.action & Action.ROLLBACK for rule in rules)

    def answers(self, fault: Cause) -> frozenset[str]:
        """Actions for a fault; empty if the policy has no rule for it or only observes.

        A rule for `unknown` also applies to a killed worker.
        """
        fault = Cause.UNKNOWN if fault is Cause.WORKER else fault
        return frozenset() if self.observes else self.faults.get(fault, frozenset())

    @property
    def observes(self) -> bool:
        """Whether the policy only observes and changes nothing."""
        return self.engine.mode == "observe"

    @property
    def may_limit_lr(self) -> bool:
        """Whether rollbacks limit the learning rate. Otherwise only rules of the policy cut it."""
        return self.rollback.confirm and self.engine.limits_lr
