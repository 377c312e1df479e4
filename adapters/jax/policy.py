"""From what a user names as a policy to the engine that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healcore.core.engine import Engine, EngineConfig


def engine_of(policy: Any, overrides: Mapping[str, Any] = {}) -> Engine:
    """The engine of a policy.

    Args:
        policy: a preset's name, the path of a TOML file, a `healcore.policy.Policy`, or an Engine
            or EngineConfig (whose numbers may be traced arrays).
        overrides: `healcore.policy.Overrides`; none for an Engine or EngineConfig.

    Raises:
        healcore.policy.PolicyError: there is no such policy, or it is not a valid one.
    """
    if isinstance(policy, Engine) and not overrides:
        return policy
    if isinstance(policy, EngineConfig) and not overrides:
        return Engine(policy)
    # Here and not above: a transformation built from an EngineConfig needs no pydantic.
    from healcore import policy as policies

    # An Engine with values to replace is refused there.
    return policies.load(policy, **overrides).engine()  # type: ignore[arg-type]
