"""Checks that a healing transformation comes before the optimizer in its chain.

A member of a chain gets only the updates of the member before it, so it cannot know its position.
The state of the chain shows the order, where the optimizer has a state (SGD without momentum has
none, and the states of `optax.named_chain` are not in order).
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
from jax.tree_util import SequenceKey

from healcore.jax.norms import is_gradient

Path = tuple[Any, ...]


def warn_if_after_optimizer(root: Any, path: Path) -> None:
    """Warns where the state of an optimizer comes before a healing state in a chain.

    Not an error: updates may be clipped there on purpose, and a user's own tuple of states looks
    like the state of a chain.

    Args:
        root: an optimizer state, or a train state with one in it.
        path: to the HealState.
    """
    index = max((i for i, key in enumerate(path) if isinstance(key, SequenceKey)), default=None)
    if index is None or not path[index].idx:
        return
    chain = root
    for key in path[:index]:
        chain = getattr(chain, key.name) if hasattr(key, "name") else chain[_index(key)]
    if type(chain) is not tuple or not all(map(_is_state, chain)):
        return
    if any(map(is_gradient, jax.tree.leaves(chain[: path[index].idx]))):
        warnings.warn(
            "heal, heal_zclip and protect judge gradients, but here an optimizer comes before them "
            "in the chain: they judge its updates, and a NaN is in its moments already. Put the "
            "healing first: optax.chain(heal_zclip(), optax.adamw(1e-3))",
            stacklevel=4,
        )


def _is_state(node: Any) -> bool:
    """Whether a member of a tuple is the state of a transformation, not a tree of parameters."""
    return isinstance(node, tuple)


def _index(key: Any) -> Any:
    return key.idx if isinstance(key, SequenceKey) else key.key
