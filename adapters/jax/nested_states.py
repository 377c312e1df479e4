"""Finds the healing state in an optimizer state, however its states are nested."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
from jax.tree_util import SequenceKey

from healcore.jax.array_leaves import PyTree
from healcore.jax.gradients import is_gradient
from healcore.jax.heal_state import HealState
from healcore.jax.optax_states import is_optax_state
from healcore.jax.state_policy import HealStateError
from healcore.jax.tree_nodes import Path, map_nodes, node_at, nodes

State = TypeVar("State")


def find(opt_state: PyTree) -> HealState:
    """Finds the HealState in an optimizer state, and takes its arrays out of nnx Variables.

    Warns if an optimizer precedes it in a chain, see `warn_if_after_optimizer`.

    Args:
        opt_state: any nesting of optax states, with arrays or nnx Variables, or of mappings in
            their place.

    Raises:
        HealStateError: `opt_state` has no HealState, or several.
    """
    found = nodes(is_healing, opt_state)
    if len(found) == 1:
        warn_if_after_optimizer(opt_state, found[0][0])
        fields = _arrays_of_fields(found[0][1])
        windows = fields.pop("heal_windows", ())
        arrays = {name: leaves[0] for name, leaves in fields.items() if leaves}
        return HealState(heal_windows=windows, **arrays)
    if found:
        places = [f"opt_state{jax.tree_util.keystr(path)}" for path, _ in found]
        raise HealStateError(
            f"this optimizer state contains {len(found)} healing states, at {', '.join(places)}: "
            "pass a part with only one of them"
        )
    raise HealStateError(
        f"no healing state in this {type(opt_state).__name__}: pass the opt_state of a "
        "transformation that contains heal(), heal_zclip() or protect() (a TrainState and an "
        "nnx.Optimizer have it at .opt_state)"
    )


def replace(opt_state: State, new: HealState) -> State:
    """Replaces the values of the HealState in an optimizer state.

    Args:
        opt_state: as for `find`.
        new: a HealState with the shapes of the old one.

    Returns:
        The state in the same form. Variables and mappings are new objects.
    """

    def replaced(old: PyTree) -> PyTree:
        values = {name: iter(arrays) for name, arrays in _arrays_of_fields(new).items()}

        def value(path: Path, _: PyTree) -> PyTree:
            return next(values[getattr(path[0], "name", None) or path[0].key])

        return jax.tree_util.tree_map_with_path(value, old)

    return map_nodes(is_healing, replaced, opt_state)


def is_healing(node: PyTree) -> bool:
    """Whether a node is a HealState, or a mapping that flax or Orbax has made of one."""
    return isinstance(node, HealState) or (isinstance(node, Mapping) and "heal_engine" in node)


def _arrays_of_fields(node: PyTree) -> dict[str, tuple[Any, ...]]:
    """The arrays of each field of a HealState, without the Variables around them."""
    fields = node if isinstance(node, Mapping) else node._asdict()
    return {name: tuple(jax.tree.leaves(field)) for name, field in fields.items()}


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
