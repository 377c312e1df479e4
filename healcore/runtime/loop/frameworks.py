"""Which framework a state belongs to. A framework that the program does not use is not imported."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from healcore.core.errors import HealcoreError
from healcore.plugins import registry
from healcore.plugins.registry import FRAMEWORKS
from healcore.runtime.driver import Driver
from healcore.runtime.host_policy import HostPolicy


class UnknownState(HealcoreError, TypeError):
    """A state that no driver supports; the message says what to pass."""


def framework_of(state: Any) -> str:
    """The framework of a state to protect.

    Args:
        state: a mapping with a torch module or optimizer among its values, or a JAX pytree.

    Raises:
        UnknownState: it is neither.
    """
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(state, Mapping):
        kinds = (torch.optim.Optimizer, torch.nn.Module)
        if any(isinstance(getattr(each, "optimizer", each), kinds) for each in state.values()):
            return "torch"
    if jax is not None:
        return "jax"
    raise UnknownState(
        f"state is a {type(state).__name__} with nothing of torch or JAX in it: pass "
        'state={"model": model, "optimizer": optimizer, ...} in torch, in JAX the train state '
        "that the step returns"
    )


def driver_for(
    state: Any, policy: HostPolicy, framework: str | None, attach: Mapping[str, Any]
) -> Driver:
    """The driver of a state.

    Args:
        state: the user's.
        policy: the policy.
        framework: "torch", "jax", or None to detect it from the state.
        attach: options of `healcore.torch.attach`, for torch.

    Raises:
        UnknownState: no driver supports this state.
    """
    name = framework_of(state) if framework is None else framework
    if name not in FRAMEWORKS:
        raise UnknownState(f"framework is one of {', '.join(FRAMEWORKS)} or None, not {name!r}")
    if attach and name != "torch":
        raise UnknownState(f"attach holds options of healcore.torch.attach; this is {name}")
    options = {"attach": attach} if attach else {}  # torch only
    return registry.find(name, "driver")(state, policy.engine, **options)
