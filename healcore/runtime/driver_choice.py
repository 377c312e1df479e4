"""Chooses the `Driver` for a state, and imports only its framework."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from healcore import adapter_registry
from healcore.core.engine import Engine
from healcore.core.errors import HealcoreError
from healcore.runtime.driver import Driver, LiveState
from healcore.runtime.store.values import attribute


class UnknownState(HealcoreError, TypeError):
    """A state that no driver supports; the message explains what to pass instead."""

    __module__ = "healcore.errors"


def trainer_limit(state: LiveState) -> float | None:
    """Max gradient norm of the trainer that owns an optimizer of the state, or None.

    A part of the state that a trainer's integration has made has the attributes `attach_with` and
    `trainer_limit`.

    Args:
        state: the state as the user has passed it.

    Returns:
        The smallest of the limits, or None if no trainer owns an optimizer or none has a limit.
    """
    if not isinstance(state, Mapping):
        return None
    limits: list[float] = []
    for part in state.values():
        if attribute(part, "attach_with"):
            limit = attribute(part, "trainer_limit")
            if limit is not None:
                limits.append(limit)
    return min(limits, default=None)


def framework_of(state: LiveState) -> str:
    """Name of a state's framework. Imports no framework: the program has imported its own.

    Args:
        state: the state as the user has passed it.

    Returns:
        "torch" for a mapping that has a module or an optimizer of torch, otherwise "jax" in a
        program that has imported JAX.

    Raises:
        UnknownState: the program has imported no framework, or torch only and passes no part of it.
    """
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(state, Mapping):
        kinds = (torch.optim.Optimizer, torch.nn.Module)
        for part in state.values():
            if isinstance(getattr(part, "optimizer", part), kinds):
                return "torch"
    if jax is not None:
        return "jax"
    raise UnknownState(
        f"state is a {type(state).__name__} and has no part of torch or JAX: pass "
        'state={"model": model, "optimizer": optimizer, ...} in torch, in JAX the train state '
        "that the step returns"
    )


def driver_for(state: LiveState, engine: Engine, attach: Mapping[str, Any]) -> Driver:
    """Creates the driver of a state, and imports only its framework.

    Args:
        state: the state as the user has passed it.
        engine: the policy's engine, of which the driver keeps one state per optimizer.
        attach: options of `healcore.torch.attach`; empty for other frameworks.

    Raises:
        UnknownState: no driver supports the state, or `attach` is given for another framework.
    """
    name = framework_of(state)
    if attach and name != "torch":
        given = ", ".join(attach)
        raise UnknownState(
            f"attach has options of healcore.torch.attach ({given}), and this state is of {name}: "
            "pass no `attach`; options of a step in JAX are arguments of healcore.jax.protect"
        )
    make_driver = adapter_registry.find(name, "driver")
    if attach:
        return make_driver(state, engine, attach=attach)
    return make_driver(state, engine)
