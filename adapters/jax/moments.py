"""Resets the moments in optax states, as if no step had been taken, and leaves schedules alone.

States are known by their type: nothing says which optimizer has made them. In the table are those
whose moments begin at zero whatever the optimizer's arguments. The `count` next to moments drives
the bias correction; that of a schedule is in a state of its own, which stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

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


def reset(tree: Any, zeroed: Callable[[Any], Any]) -> Any:
    """The tree with `zeroed(leaf)` for each moment, and for each count next to moments."""

    def of(node: Any) -> Any:
        if not _has_moments(node):
            return node
        fields = {name: getattr(node, name) for name in _MOMENTS[type(node).__name__]}
        return node._replace(**jax.tree.map(zeroed, fields))

    return jax.tree.map(of, tree, is_leaf=_has_moments)


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


def _has_moments(node: Any) -> bool:
    kind = type(node)
    return kind.__module__.startswith("optax.") and kind.__name__ in _MOMENTS


def _is_known(node: Any) -> bool:
    return _has_moments(node) or isinstance(node, _NO_MOMENTS)
