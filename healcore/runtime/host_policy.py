"""The part of a policy that the host carries out, and the engine that belongs to it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from healcore.core.engine import Engine
from healcore.core.verdict import Action, Cause
from healcore.policy import PolicyLike, dumps
from healcore.policy.loader import resolve
from healcore.policy.recovery import Hang, Retry, Rollback, SkipBatch
from healcore.policy.trainer_limit import with_limit


class HostPolicy(NamedTuple):
    """A policy as the Healer needs it."""

    name: str
    fingerprint: str | None
    text: str | None
    """The policy as TOML with every key, or None for an engine, which has no text."""
    engine: Engine
    probation: int
    """Healthy steps after a checkpoint until it is known-good."""
    skip_batches: int
    """Batches to skip in addition to the batches of the trouble."""
    region: int
    """Incidents that begin fewer steps apart than this count as the same trouble."""
    recoveries: int
    """Rollbacks that are allowed within `refund_after` steps of the run."""
    refund_after: int
    confirm: bool
    """Whether a rollback needs evidence that the model is worse."""
    evidence: float = 1e4
    """Comparisons with earlier weights per false rollback, at least and on average."""
    nonfinite_state: str = "rollback"
    """What follows if a save finds NaN or Inf in the state: alert, rollback or stop."""
    reset_moments: bool = False
    """A rollback resets the optimizers' moments too."""
    faults: Mapping[Cause, frozenset[str]] = MappingProxyType({})
    """What the rules answer to a fault: words such as "retry"; see `healcore.policy.respond`."""
    retry: Retry = Retry()
    skip_batch: SkipBatch = SkipBatch()
    hang: Hang = Hang()
    shrinks: int = 0
    """How often a micro-batch that does not fit into memory may be halved."""

    @classmethod
    def of(
        cls, policy: PolicyLike, overrides: Mapping[str, Any] = {}, limit: float | None = None
    ) -> HostPolicy:
        """The host's part of a policy; an Engine gets defaults for keys only policy files have.

        `limit` is the max gradient norm of the trainer that owns the optimizer, or None.
        """
        found = with_limit(resolve(policy, overrides), limit)
        if isinstance(found, Engine):
            name, text, engine, host = "(engine)", None, found, Rollback()
            faults, retry, skip_batch, hang, shrinks = {}, Retry(), SkipBatch(), Hang(), 0
        else:
            name, text, engine, host = found.name, dumps(found), found.engine(), found.rollback
            faults, retry, skip_batch = found.fault_actions(), found.retry, found.skip_batch
            hang, shrinks = found.hang, found.budget.shrinks
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
            faults=MappingProxyType(faults),
            retry=retry,
            skip_batch=skip_batch,
            hang=hang,
            shrinks=shrinks,
        )

    def goes_back_for(self, causes: Cause | None = None) -> bool:
        """Whether a rule answers any of these causes, or any cause if None, with a rollback."""
        back = [each.causes for each in self.engine.config.rules if each.action & Action.ROLLBACK]
        found = any(causes is None or each & causes for each in back)
        return found and not self.observes

    def answers(self, fault: Cause) -> frozenset[str]:
        """What is done about a fault; nothing if the policy has no rule for it or only observes."""
        return frozenset() if self.observes else self.faults.get(fault, frozenset())

    @property
    def observes(self) -> bool:
        """Whether the policy only observes and changes nothing."""
        return self.engine.mode == "observe"
