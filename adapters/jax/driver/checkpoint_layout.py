"""Divides a JAX state into the items of a checkpoint, and puts a restored state together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr

from healcore.jax.bare_state import with_heal_state, without_heal_state
from healcore.jax.driver.leaf_form import as_live, as_saved, form, is_number
from healcore.runtime.store.errors import StateMismatch

STATE = "state"
"""Name of the item for a state without names."""
SIDE_STATE = "healcore.side_state"
"""Name of the item for `SideState`."""


class CheckpointLayout:
    """The items of one run's state; the same in every process of the program.

    Args:
        tree: the state as the run begins.
        named: its top level maps names to parts, which become the items.
    """

    def __init__(self, tree: Any, *, named: bool) -> None:
        self._named = named
        self._accumulates = any(
            map(_is_accumulator, jax.tree.leaves(tree, is_leaf=_is_accumulator))
        )

    def items(self, tree: Any) -> dict[str, Any]:
        """The items of a state: name -> tree."""
        side_state = SideState(tree)
        return {**self._parts(_saved(tree)), **({SIDE_STATE: side_state} if side_state else {})}

    def restored(self, items: Mapping[str, Any], tree: Any) -> Any:
        """The restored state with the live healing state.

        Accumulators of optax.MultiSteps are zeroed: a NaN in them would stay for ever.

        Args:
            items: by the names of `items`.
            tree: the live state.

        Raises:
            StateMismatch: it does not fit.
        """
        wanted = self._parts(_saved(tree))
        missing = [f'there is no "{name}" in it' for name in wanted if name not in items]
        if missing:
            raise StateMismatch(None, missing)
        found = {name: items[name] for name in wanted}
        wrong = [line for name in wanted for line in _differences(name, found[name], wanted[name])]
        if wrong:
            raise StateMismatch(None, wrong)
        side_state = items.get(SIDE_STATE, {})
        bare = jax.tree_util.tree_map_with_path(
            lambda path, new, live: as_live(side_state.get(keystr(path), new), live),
            found if self._named else found[STATE],
            without_heal_state(tree),
        )
        new = with_heal_state(_without_accumulated(bare), like=tree)
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: _norm(side_state, path, leaf) if _is_norm(path) else leaf, new
        )

    def between_steps(self, tree: Any) -> bool:
        """Whether nothing is accumulated. Reads the device if the optimizer accumulates."""
        if not self._accumulates:
            return True
        nodes = jax.tree.leaves(tree, is_leaf=_is_accumulator)
        return not any(int(node.mini_step) for node in nodes if _is_accumulator(node))

    def _parts(self, tree: Any) -> dict[str, Any]:
        return dict(tree) if self._named else {STATE: tree}


class SideState:
    """What the other items cannot hold: Python numbers, and `ProtectState.heal_update_norm`.

    The norm exists only if the policy reads it.
    """

    optional = True  # checkpoints of a run without healcore do not have it

    def __init__(self, tree: Any) -> None:
        bare = jax.tree_util.tree_leaves_with_path(without_heal_state(tree))
        whole = jax.tree_util.tree_leaves_with_path(tree)
        self._kept = {
            **{keystr(path): leaf for path, leaf in bare if is_number(leaf)},
            **{keystr(path): leaf for path, leaf in whole if _is_norm(path)},
        }

    def __bool__(self) -> bool:
        return bool(self._kept)

    def state_dict(self) -> dict[str, Any]:
        """The values by their path in the state."""
        return self._kept


def _saved(tree: Any) -> Any:
    return jax.tree.map(as_saved, without_heal_state(tree))


def _norm(side_state: Mapping[str, Any], path: tuple[Any, ...], live: Any) -> Any:
    """The restored norm; 0, as after a skip, if there is none."""
    return as_live(side_state.get(keystr(path), jnp.zeros((), jnp.float32)), live)


def _differences(name: str, found: Any, wanted: Any) -> list[str]:
    if jax.tree.structure(found) != jax.tree.structure(wanted):
        return [f'"{name}" has another structure']
    pairs = zip(jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(found), strict=True)
    return [
        f"{name}{keystr(path)} is {form(new)} in it, {form(live)} in the live state"
        for (path, live), new in pairs
        if form(new) != form(live)
    ]


def _without_accumulated(tree: Any) -> Any:
    def one(node: Any) -> Any:
        if not _is_accumulator(node):
            return node
        count, gradients = jax.tree.map(_zero, (node.mini_step, node.acc_grads))
        return node._replace(mini_step=count, acc_grads=gradients)

    return jax.tree.map(one, tree, is_leaf=_is_accumulator)


def _zero(leaf: Any) -> Any:
    return as_live(jnp.zeros(leaf.shape, leaf.dtype), leaf)


def _is_accumulator(node: Any) -> bool:
    return isinstance(node, optax.MultiStepsState)


def _is_norm(path: tuple[Any, ...]) -> bool:
    return bool(path) and getattr(path[-1], "name", None) == "heal_update_norm"
