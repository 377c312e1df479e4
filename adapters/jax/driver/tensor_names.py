"""Names of the tensors whose gradient norms an engine gets."""

from __future__ import annotations

from typing import Any

import jax

from healcore.jax.bare_state import without_heal_state
from healcore.jax.norms import is_gradient

_PARAMETERS = ("params", "model")

Path = tuple[Any, ...]


def names(tree: Any, engine: Path, count: int) -> tuple[str, ...]:
    """Names of the tensors that an engine judges.

    An optimizer state does not say which part of the train state it optimizes. This takes the
    part with as many floating tensors as the engine gets gradients; of several the one called
    `params` or `model`, or the one nearest to the optimizer.

    Args:
        tree: a train state.
        engine: path to the engine's HealState in it.
        count: number of tensors.

    Returns:
        As JAX writes paths, `['params']['Dense_0']['kernel']`. Numbers where that would be a guess.
    """
    parts: dict[Path, list[Path]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(without_heal_state(tree)):
        if is_gradient(leaf):
            for depth in range(len(path) + 1):
                parts.setdefault(path[:depth], []).append(path)
    fitting = [path for path, leaves in parts.items() if len(leaves) == count]
    outermost = [path for path in fitting if path[:-1] not in fitting or not path]
    best = min((_unlikely(path, engine) for path in outermost), default=None)
    likeliest = [path for path in outermost if _unlikely(path, engine) == best]
    within = {tuple(leaf[len(path) :] or leaf for leaf in parts[path]) for path in likeliest}
    if len(within) != 1:  # none, or different ones
        return tuple(f"gradient {i} of {count}" for i in range(count))
    return tuple(jax.tree_util.keystr(leaf) for leaf in parts[likeliest[0]])


def _unlikely(path: Path, engine: Path) -> tuple[bool, bool, int]:
    """A sort key for the parts of a state: the likeliest to be the parameters first."""
    last = str(getattr(path[-1], "name", getattr(path[-1], "key", ""))) if path else ""
    shared = 0
    while shared < min(len(path), len(engine)) and path[shared] == engine[shared]:
        shared += 1
    in_optimizer = shared >= max(1, len(engine) - 1)
    return last not in _PARAMETERS, in_optimizer, -shared
