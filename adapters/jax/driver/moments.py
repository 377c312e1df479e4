"""Resets the moments in optax states, as if no step had been taken, and leaves schedules alone.

The driver has states and not the optimizer that made them, so it knows them by their type. In the
table are those that begin at zero whatever the optimizer's arguments. The `count` next to moments
drives the bias correction; that of a schedule is in a state of its own, which stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from healcore.jax.driver.checkpoint_layout import as_live
from healcore.jax.gradients import is_gradient
from healcore.jax.lr import ScaleByHealLrState
from healcore.jax.state import HealState, child

_MOMENTS = {
    "TraceState": ("trace",),
    "EmaState": ("count", "ema"),
    "ScaleByAdamState": ("count", "mu", "nu"),
    "ScaleByAmsgradState": ("count", "mu", "nu", "nu_max"),
    "ScaleByBeliefState": ("count", "mu", "nu"),
    "ScaleByLionState": ("count", "mu"),
    "ScaleByAdaDeltaState": ("e_g", "e_x"),
    "ScaleByAdanState": ("m", "v", "n", "g", "t"),
    "FactoredState": ("count", "v_row", "v_col", "v"),
    "MuonState": ("count", "mu"),
}
"""optax's states with moments: class -> fields that are zero at the start."""

_NO_MOMENTS = (HealState, ScaleByHealLrState)


def reset(tree: Any) -> Any:
    """The tree with the moments of every known state at zero."""
    return jax.tree.map(
        lambda node: _zeroed(node) if _has_moments(node) else node, tree, is_leaf=_has_moments
    )


def obstacle(tree: Any, engines: Iterable[tuple[Any, ...]]) -> str:
    """Why moments cannot be reset; "" if they can. `engines`: paths of the HealStates in `tree`."""
    for path in engines:
        optimizer = tree
        for key in path[:-1]:
            optimizer = child(optimizer, key)
        for place, node in jax.tree_util.tree_leaves_with_path(optimizer, is_leaf=_is_known):
            if _is_known(node) or any(getattr(key, "name", "") == "acc_grads" for key in place):
                continue  # `replace` empties the accumulators of optax.MultiSteps
            if jnp.ndim(node) and is_gradient(node):  # numbers are scales and hyperparameters
                name = jax.tree_util.keystr((*path[:-1], *place))
                return (
                    f"state{name} is of no optax state whose first values are known (they are "
                    f"{', '.join(_MOMENTS)})"
                )
    return ""


def _zeroed(state: Any) -> Any:
    fields = {name: getattr(state, name) for name in _MOMENTS[type(state).__name__]}
    zeros = jax.tree.map(lambda leaf: as_live(jnp.zeros_like(leaf), leaf), fields)
    return state._replace(**zeros)


def _has_moments(node: Any) -> bool:
    kind = type(node)
    return kind.__module__.startswith("optax.") and kind.__name__ in _MOMENTS


def _is_known(node: Any) -> bool:
    return _has_moments(node) or isinstance(node, _NO_MOMENTS)
