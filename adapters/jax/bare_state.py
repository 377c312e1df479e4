"""A train state without its healing part, and with it again."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import optax

from healcore.jax.lr import ScaleByHealLrState
from healcore.jax.protect import ProtectState
from healcore.jax.state import HealState, HealStateError

PyTree = Any
"""Any nesting of registered nodes: JAX has no type for it."""
State = TypeVar("State")


def without_heal_state(state: PyTree) -> PyTree:
    """The state as it was before anybody healed it: what a checkpoint of a plain optax run holds.

    A `protect` becomes the optimizer it protects; a member of a chain (`heal`, `heal_zclip`,
    `scale_by_heal_lr`) becomes the empty state of a stateless one, as `clip_by_global_norm` has it.

        old = store.restore(step, {"state": without_heal_state(state)}).state["state"]
        state = with_heal_state(old, like=state)

    Args:
        state: any pytree: a train state, an optimizer state.

    Returns:
        A tree without any array of healcore's. Copies nothing.
    """
    return jax.tree.map(
        lambda node: _bare(node) if _healing(node) else node, state, is_leaf=_healing
    )


def with_heal_state(bare: PyTree, like: State) -> State:
    """The opposite of `without_heal_state`.

    Also the way from a run without healcore, or with another policy: `protect` begins with the
    moments that the optimizer has,

        # old: of adamw, or of chain(clip, adamw)
        opt_state = with_heal_state(old, like=tx.init(params))
        # old: of another policy
        opt_state = with_heal_state(without_heal_state(old), like=tx.init(params))

    Args:
        bare: a tree of the structure of ``without_heal_state(like)``, or a chain with one such
            tree in it and otherwise stateless members.
        like: the state whose healing part is to be taken over, live or fresh from ``tx.init``.

    Returns:
        `bare` with the detectors, budgets and learning-rate multiplier of `like`.

    Raises:
        HealStateError: `bare` has another structure.
    """
    bare = _part_like(without_heal_state(like), bare)
    nodes, structure = jax.tree.flatten(like, is_leaf=_healing)
    try:
        parts = structure.flatten_up_to(bare)
    except ValueError as error:
        raise HealStateError(
            f"this state does not have the structure of without_heal_state(like): {error}. Pass a "
            "state of the same model and optimizer"
        ) from None
    return structure.unflatten(
        _whole(part, node) if _healing(node) else part
        for part, node in zip(parts, nodes, strict=True)
    )


def _part_like(wanted: Any, tree: Any) -> Any:
    """The one member of a chain that has the structure wanted, if that is all that it holds."""
    structure = jax.tree.structure(wanted)
    if jax.tree.structure(tree) == structure:
        return tree

    def fits(node: Any) -> bool:
        return jax.tree.structure(node) == structure

    nodes = jax.tree.leaves(tree, is_leaf=fits)
    return nodes[0] if len(nodes) == 1 and fits(nodes[0]) else tree


def _bare(node: Any) -> Any:
    if isinstance(node, ProtectState):
        return without_heal_state(node.inner_state)
    return optax.EmptyState()


def _whole(bare: Any, node: Any) -> Any:
    if not isinstance(node, ProtectState):
        return node
    return node._replace(inner_state=with_heal_state(bare, node.inner_state))


def _healing(node: Any) -> bool:
    return isinstance(node, (HealState, ProtectState, ScaleByHealLrState))
