"""Whether a healing transformation stands where it can heal: before the optimizer of its chain.

A member of a chain is given the updates of the one before it and nothing else, so it cannot see its
place. The state of the chain shows it, where the optimizer keeps one (SGD without momentum keeps
none, and the states of `optax.named_chain` have lost their order).
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
from jax.tree_util import SequenceKey

from healcore.jax.norms import judged

Path = tuple[Any, ...]


def warn_if_behind(root: Any, path: Path) -> None:
    """Warns where the state of an optimizer comes before a healing state in a chain.

    A warning and no error: updates may be clipped there on purpose, and a tuple of states that a
    user made looks like that of a chain.

    Args:
        root: an optimizer state, or a train state with one in it.
        path: to the HealState.
    """
    place = max((i for i, key in enumerate(path) if isinstance(key, SequenceKey)), default=None)
    if place is None or not path[place].idx:
        return
    chain = root
    for key in path[:place]:
        chain = getattr(chain, key.name) if hasattr(key, "name") else chain[_index(key)]
    if type(chain) is not tuple or not all(map(_is_state, chain)):
        return
    if any(map(judged, jax.tree.leaves(chain[: path[place].idx]))):
        warnings.warn(
            "heal, heal_zclip and protect judge gradients, and here an optimizer with a state of "
            "its own comes before in the chain: they see its updates, and a NaN is in its moments "
            "already. Write optax.chain(heal_zclip(), optax.adamw(1e-3)), the healing first",
            stacklevel=4,
        )


def _is_state(node: Any) -> bool:
    """Whether a member of a tuple is what a transformation keeps, and no tree of parameters."""
    return isinstance(node, tuple)


def _index(key: Any) -> Any:
    return key.idx if isinstance(key, SequenceKey) else key.key
