"""What of a policy the host carries out, and the engine that belongs to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from healcore import policy as policies
from healcore.core.engine import Engine, EngineConfig
from healcore.core.verdict import Action, Cause
from healcore.policy import Policy
from healcore.policy.recovery import Rollback


class Terms(NamedTuple):
    """A policy, as the Healer needs it."""

    name: str
    fingerprint: str | None
    """None for an engine that was built without a policy file."""
    text: str | None
    """The policy as TOML, every key spelt out."""
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

    def goes_back_for(self, causes: Cause) -> bool:
        """Whether a rule answers any of these causes with a rollback."""
        rules = self.engine.config.rules
        back = any(rule.action & Action.ROLLBACK and rule.causes & causes for rule in rules)
        return back and not self.observes

    @property
    def observes(self) -> bool:
        """Whether nothing is to be changed."""
        return self.engine.mode == "observe"


def terms_of(policy: Any, overrides: Mapping[str, Any] = {}) -> Terms:
    """The terms of whatever a user names as a policy.

    Args:
        policy: a preset's name, the path of a TOML file, a `healcore.policy.Policy`, or an Engine
            or EngineConfig, whose host part is then the default one.
        overrides: `healcore.policy.Overrides`; none for an Engine or EngineConfig.

    Raises:
        healcore.policy.PolicyError: there is no such policy, or it is not a valid one.
    """
    if isinstance(policy, EngineConfig) and not overrides:
        policy = Engine(policy)
    if isinstance(policy, Engine) and not overrides:
        host = Rollback()
        budget = policy.config.budget
        return Terms(
            "(engine)",
            None,
            None,
            policy,
            host.probation,
            host.skip_batches,
            host.region,
            int(budget.recoveries),
            int(budget.refund_after),
            host.confirm,
            host.nonfinite_state,
        )
    # An Engine with values to replace is refused there.
    loaded: Policy = policies.load(policy, **overrides)  # type: ignore[arg-type]
    return Terms(
        loaded.name,
        policies.fingerprint(loaded),
        policies.dumps(loaded),
        loaded.engine(),
        loaded.rollback.probation,
        loaded.rollback.skip_batches,
        loaded.rollback.region,
        loaded.budget.recoveries,
        loaded.budget.refund_after,
        loaded.rollback.confirm,
        loaded.rollback.nonfinite_state,
    )
