"""Saves and loads the engine's state in an optimizer state: to_dict, from_dict, on_rollback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from healcore.jax.state import (
    engine_state,
    find,
    neutral_decision,
    replace,
    with_engine_state,
)
from healcore.jax.state_layout import with_change_expected

if TYPE_CHECKING:
    from healcore.core.engine import Engine
    from healcore.policy import PolicyLike

State = TypeVar("State")
"""Any nesting of optax states."""


def to_dict(opt_state: optax.OptState, policy: PolicyLike) -> dict[str, Any]:
    """The engine's state in the framework-neutral, JSON-safe form. Reads the device.

    Args:
        opt_state: any nesting of optax states with one healing state in it.
        policy: the policy that the optimizer was built with.

    Returns:
        The state; `healcore.torch` and NumPy can load it and make the same decisions.

    Raises:
        HealStateError: there is no healing state in it, or more than one.
    """
    engine = _engine(policy)
    return engine.to_dict(jax.device_get(engine_state(engine, find(opt_state))))


def from_dict(opt_state: State, data: Mapping[str, Any], policy: PolicyLike) -> State:
    """An optimizer state that goes on from a saved engine state.

    Args:
        opt_state: a state of this run's optimizer, usually fresh from ``tx.init(params)``.
        data: from `to_dict` of any adapter.
        policy: the policy that the optimizer was built with.

    Returns:
        `opt_state` with the engine's state replaced, its dtypes and shapes kept.

    Raises:
        StateError: `data` is damaged, or of another policy or number of tensors.
        HealStateError: there is no healing state in `opt_state`, more than one, or one of another
            policy.
    """
    engine = _engine(policy)
    old = find(opt_state)
    engine_state(engine, old)  # raises unless the policy is that of the optimizer
    state = with_engine_state(engine, old, engine.from_dict(data))
    return replace(opt_state, state._replace(heal_decision=neutral_decision(old)))


def expect_change(opt_state: State) -> State:
    """Opens the grace window at the next step: LR, batch, data or weights are about to change.

    The same as ``change_expected=True`` in that step's update, for a host that does not call it.

    Args:
        opt_state: any nesting of optax states with one healing state in it.

    Raises:
        HealStateError: there is no healing state in it, or more than one.
    """
    state = find(opt_state)
    return replace(opt_state, state._replace(heal_ints=with_change_expected(state.heal_ints)))


def on_rollback(live: State, restored: State, policy: PolicyLike) -> State:
    """The optimizer state to go on with after a checkpoint was restored.

    Args:
        live: the optimizer state at the moment of the rollback.
        restored: the one that the checkpoint holds.
        policy: the policy that the optimizer was built with.

    Returns:
        `restored`, with the budgets and the LR multiplier of `live`: a rollback keeps them.

    Raises:
        HealStateError: one of the two holds no healing state, or more than one.
    """
    engine = _engine(policy)
    now, then = find(live), find(restored)
    state = engine.on_rollback(engine_state(engine, now), engine_state(engine, then), xp=jnp)
    return replace(restored, with_engine_state(engine, then, state))


def _engine(policy: PolicyLike) -> Engine:
    from healcore.policy import engine_of  # here: `import healcore.jax` loads no pydantic

    return engine_of(policy)
