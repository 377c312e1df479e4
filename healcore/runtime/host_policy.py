"""`HostPolicy`: the part of a policy that the host carries out, and its engine."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from healcore.core.engine import Engine, RuleConfig
from healcore.core.verdict import Action, Cause
from healcore.policy import PolicyLike, dumps
from healcore.policy.loader import resolve
from healcore.policy.recovery import Hang, Retry, Rollback, SkipBatch
from healcore.policy.trainer_limit import with_limit


class HostPolicy(NamedTuple):
    """The engine of a policy, and the policy's values for the Healer."""

    name: str
    fingerprint: str | None
    text: str | None
    """The policy as TOML with every key, or None if the user passed an engine."""
    engine: Engine
    probation: int
    """Healthy steps after which a checkpoint is known-good."""
    skip_batches: int
    """Number of batches that a rollback skips after the bad batches."""
    region: int
    """Steps between two onsets below which both incidents count as the same trouble."""
    recoveries: int
    """Max rollbacks within `refund_after` steps of the run."""
    refund_after: int
    confirm: bool
    """Whether a rollback needs evidence that the model is worse."""
    evidence: float = 1e4
    """Lower bound on the mean number of comparisons of weights until a false rollback."""
    nonfinite_state: str = "rollback"
    """Response to a save that finds NaN or Inf in the state: alert, rollback or stop."""
    reset_moments: bool = False
    """Whether a rollback resets the optimizers' moments."""
    rules: tuple[RuleConfig, ...] = ()
    """Rules that the host applies; see `Policy.host_rules`."""
    faults: Mapping[Cause, frozenset[str]] = MappingProxyType({})
    """Fault -> actions of its rule, such as "retry"; see `healcore.policy.respond`."""
    retry: Retry = Retry()
    skip_batch: SkipBatch = SkipBatch()
    hang: Hang = Hang()
    shrinks: int = 0
    """Times that micro-batches which do not fit into memory may be halved."""

    @classmethod
    def of(
        cls, policy: PolicyLike, overrides: Mapping[str, Any] = {}, limit: float | None = None
    ) -> HostPolicy:
        """The host's part of a policy; with an Engine, keys of policy files have their defaults.

        `limit` is the max gradient norm of the trainer that owns the optimizer, or None.
        """
        resolved = with_limit(resolve(policy, overrides), limit)
        if isinstance(resolved, Engine):
            name, text, engine, host, rules = "(engine)", None, resolved, Rollback(), ()
            faults, retry, skip_batch, hang, shrinks = {}, Retry(), SkipBatch(), Hang(), 0
        else:
            name, text = resolved.name, dumps(resolved)
            engine, host, rules = resolved.engine(), resolved.rollback, resolved.host_rules()
            faults, retry = resolved.fault_actions(), resolved.retry
            skip_batch, hang = resolved.skip_batch, resolved.hang
            shrinks = resolved.budget.shrinks
        config = engine.config
        return cls(
            name,
            engine.fingerprint,
            text,
            engine,
            probation=host.probation,
            skip_batches=host.skip_batches,
            region=int(config.rollback.region),
            recoveries=int(config.budget.recoveries),
            refund_after=int(config.budget.refund_after),
            confirm=host.confirm,
            evidence=host.evidence,
            nonfinite_state=host.nonfinite_state,
            reset_moments=host.reset_moments,
            rules=rules,
            faults=MappingProxyType(faults),
            retry=retry,
            skip_batch=skip_batch,
            hang=hang,
            shrinks=shrinks,
        )

    def goes_back_for(self, causes: Cause | None = None) -> bool:
        """Whether a rule rolls back for one of these causes, or for any cause if None."""
        if self.observes:
            return False
        all_rules = (*self.engine.config.rules, *self.rules)
        rules = [rule for rule in all_rules if rule.action & Action.ROLLBACK]
        return any(causes is None or rule.causes & causes for rule in rules)

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
