"""Finds the healing state in an optimizer state, however its states are nested."""

from __future__ import annotations

import warnings

import jax
from jax.tree_util import SequenceKey

from healcore.jax.array_leaves import PyTree
from healcore.jax.gradients import is_gradient
from healcore.jax.heal_state import HealState
from healcore.jax.optax_states import is_optax_state
from healcore.jax.state_policy import HealStateError
from healcore.jax.tree_nodes import Path, node_at, nodes


def find(opt_state: PyTree) -> HealState:
    """Finds the HealState in an optimizer state.

    Warns if an optimizer precedes it in a chain, see `warn_if_after_optimizer`.

    Args:
        opt_state: any nesting of optax states.

    Raises:
        HealStateError: `opt_state` has no HealState, or several.
    """
    found = nodes(HealState, opt_state)
    if len(found) == 1:
        warn_if_after_optimizer(opt_state, found[0][0])
        return found[0][1]
    if found:
        places = [f"opt_state{jax.tree_util.keystr(path)}" for path, _ in found]
        raise HealStateError(
            f"this optimizer state contains {len(found)} healing states, at {', '.join(places)}: "
            "pass a part with only one of them"
        )
    raise HealStateError(
        f"no healing state in this {type(opt_state).__name__}: pass the opt_state of a "
        "transformation that contains heal(), heal_zclip() or protect() (a TrainState has it at "
        ".opt_state; for an nnx.Optimizer use healcore.jax.flax_nnx.last_decision)"
    )


def warn_if_after_optimizer(root: PyTree, path: Path) -> None:
    """Warns if an optimizer's state precedes the healing state at `path` in a chain.

    Detects only optimizers with a state (SGD without momentum has no state), and not in
    `optax.named_chain`, whose states are unordered. This is not an error, because the order may be
    intended, or the tuple may be a user's own.

    Args:
        root: any tree with the healing state, such as a TrainState.
        path: path of a HealState in it.
    """
    index = None
    for i, key in enumerate(path):
        if isinstance(key, SequenceKey):
            index = i  # the last one: the innermost chain around the healing state
    if index is None:
        return
    chain = node_at(root, path[:index])
    # Every member of a chain's state is a tuple, unlike the members of a tree of parameters.
    if type(chain) is not tuple or not all(isinstance(member, tuple) for member in chain):
        return
    before = chain[: path[index].idx]
    if nodes(HealState, before):
        return  # a user's tuple with the states of several optimizers
    states = [state for _, state in nodes(is_optax_state, before)]
    if any(map(is_gradient, jax.tree.leaves(states))):
        warnings.warn(
            "heal, heal_zclip and protect have to judge gradients, but an optimizer precedes them "
            "in this chain: they judge its updates, after a NaN has reached its moments. Put "
            "healing first: optax.chain(heal_zclip(), optax.adamw(1e-3))",
            stacklevel=4,
        )
