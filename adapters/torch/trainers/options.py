"""`resolve_options`: checks the arguments of a trainer's integration before the training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healcore.core.engine import Engine
from healcore.policy import Overrides, Policy, PolicyLike
from healcore.policy.loader import resolve
from healcore.runtime.healer import Healer


def resolve_options(
    policy: PolicyLike, options: Mapping[str, Any]
) -> tuple[Policy | Engine, dict[str, Any]]:
    """Separates the options for the policy from the options for the Healer, and checks both.

    A wrong option raises where the program writes it, and not when the training begins.

    Args:
        policy: as for `healcore.Healer`.
        options: `run_options.TrainerOptions`, and further arguments of `healcore.Healer`.

    Returns:
        The policy with its overrides, and the other arguments for `healcore.Healer`, except
        `state`.

    Raises:
        healcore.policy.PolicyError: the policy does not exist or is invalid.
        ValueError, TypeError: an option is out of range or unknown.
    """
    healer_options = dict(options)
    overrides: dict[str, Any] = {}
    for name in Overrides.__annotations__.keys() & options.keys():
        overrides[name] = healer_options.pop(name)
    resolved = resolve(policy, overrides)
    Healer(resolved, state={}, **healer_options)  # raises if an option is invalid
    return resolved, healer_options
