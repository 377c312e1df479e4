"""What of a policy the host carries out, and the engine that belongs to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from healcore.core.engine import Engine
from healcore.core.verdict import Action, Cause
from healcore.policy import PolicyLike, dumps
from healcore.policy.loader import resolve
from healcore.policy.recovery import Rollback


class HostPolicy(NamedTuple):
    """A policy, as the Healer needs it."""

    name: str
    fingerprint: str | None
    """`Engine.fingerprint`."""
    text: str | None
    """The policy as TOML, every key spelt out; None for an engine, which has no such text."""
    engine: Engine
    probation: int
    """Healthy steps after a checkpoint until it is known-good."""
    skip_batches: int
    """Batches to leave out besides those of the bad window."""
    region: int
    """Onsets fewer steps apart than this are the same trouble."""
    recoveries: int
    refund_after: int
    """Rollbacks that are allowed, within so many steps of the run."""
    confirm: bool
    """Going back needs evidence that the model is worse."""
    nonfinite_state: str = "rollback"
    """What follows when a save finds NaN or Inf in the state: alert, rollback or stop."""

    @classmethod
    def of(cls, policy: PolicyLike, overrides: Mapping[str, Any] = {}) -> HostPolicy:
        """The host's part of a policy.

        Args:
            policy: see `healcore.policy.PolicyLike`; of an Engine or EngineConfig the keys that
                only a policy file has are the default ones.
            overrides: `healcore.policy.Overrides`; none for an Engine or EngineConfig.

        Raises:
            healcore.policy.PolicyError: there is no such policy, or it is not a valid one.
        """
        found = resolve(policy, overrides)
        if isinstance(found, Engine):
            name, text, engine, host = "(engine)", None, found, Rollback()
        else:
            name, text, engine, host = found.name, dumps(found), found.engine(), found.rollback
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
            nonfinite_state=host.nonfinite_state,
        )

    def goes_back_for(self, causes: Cause) -> bool:
        """Whether a rule answers any of these causes with a rollback."""
        rules = self.engine.config.rules
        back = any(rule.action & Action.ROLLBACK and rule.causes & causes for rule in rules)
        return back and not self.observes

    @property
    def observes(self) -> bool:
        """Whether nothing is to be changed."""
        return self.engine.mode == "observe"
