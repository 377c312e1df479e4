"""What every `policy` argument takes, and the engine that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healcore.core.engine import Engine, EngineConfig
from healcore.policy.document import Policy
from healcore.policy.loading import PolicySource, load

PolicyLike = PolicySource | Engine | EngineConfig
"""A preset's name, the path of a TOML file, a `Policy`, an Engine or an EngineConfig, whose
numbers may be traced arrays."""


def resolve(policy: PolicyLike, overrides: Mapping[str, Any] = {}) -> Policy | Engine:
    """The policy with its overrides, as far as it goes: an Engine has no document.

    Args:
        policy: see `PolicyLike`.
        overrides: as `Overrides`, values to replace in it; none for an Engine or EngineConfig.

    Raises:
        PolicyError: there is no such policy, or it is not a valid one.
    """
    if isinstance(policy, EngineConfig) and not overrides:
        return Engine(policy)
    if isinstance(policy, Engine) and not overrides:
        return policy
    # An Engine with values to replace is refused there.
    return load(policy, **overrides)  # type: ignore[arg-type]


def engine_of(policy: PolicyLike, overrides: Mapping[str, Any] = {}) -> Engine:
    """The engine of a policy.

    Args:
        policy: see `PolicyLike`.
        overrides: as `Overrides`, values to replace in it; none for an Engine or EngineConfig.

    Raises:
        PolicyError: there is no such policy, or it is not a valid one.
    """
    found = resolve(policy, overrides)
    return found if isinstance(found, Engine) else found.engine()
