"""The engines of a run: finds their states in a train state, and replaces them.

A program passes its whole train state to the Healer, and each optimizer in the state that contains
`protect`, `heal` or `heal_zclip` has an engine. The other files of this folder do the rest:

    engine_tensors.py    which tensors an engine judges, and their names
    step_reader.py       what the engines have decided, read after each dispatch
    held_numbers.py      numbers of the optimizers that the Healer holds in a range
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from healcore.core.engine import Engine
from healcore.jax import engine_rows, heal_state
from healcore.jax.array_leaves import PyTree
from healcore.jax.driver.engine_tensors import (
    Path,
    candidates_of,
    is_within,
    key_name,
    tensor_names,
)
from healcore.jax.driver.leaf_forms import to_live_leaf
from healcore.jax.driver.program_state import array_of
from healcore.jax.heal_state import HealState, ScaleByHealLrState
from healcore.jax.nested_states import warn_if_after_optimizer
from healcore.jax.opt_state import without_heal_state
from healcore.jax.optax_states import check_second_iterates, is_optax_state
from healcore.jax.state_policy import HealStateError
from healcore.jax.tree_nodes import map_nodes, node_at, node_getter, nodes
from healcore.runtime.engine_names import check_engines


class EngineEntry(NamedTuple):
    """One engine of the run: where its state is, and what it judges.

    Found once at the start of a run. A run with two optimizers, such as a GAN, has two engines with
    the same policy.
    """

    name: str
    """Name of the engine in events and checkpoints: the item of the state that contains it, or the
    path of its HealState if this item contains several engines."""
    path: Path
    """Path of its HealState in the state."""
    tensor_names: tuple[str, ...]
    """Names of the tensors whose gradients it judges."""
    candidates: tuple[tuple[str, ...], ...]
    """The parts of the state that may be its parameters, or empty if these cannot be identified."""
    state_in: Callable[[PyTree], HealState]
    """Takes its HealState from the state."""


def find_engines(
    tree: PyTree, trained: Callable[[str], PyTree], engine: Engine
) -> list[EngineEntry]:
    """Finds the engines of a state.

    Called at the start of a run, and when the program has changed the structure of the state.

    Args:
        tree: the live state, as `ProgramState.read` returns it.
        trained: maps an item's name to a tree with the parameters that the item's optimizer trains.
        engine: the engine of the run's policy.

    Returns:
        One entry for each HealState, in the order of the tree.

    Raises:
        HealStateError: the state has no engine, or an engine belongs to another policy or holds
            several runs (`vmap`), or the policy cuts the learning rate of an optimizer with a
            second iterate, see `check_second_iterates`.
    """
    states = dict(nodes(HealState, tree))
    if not states:
        raise HealStateError(
            f"no healing state in this {type(tree).__name__}: pass a state that contains the state "
            "of an optimizer with protect(), heal() or heal_zclip(). nnx.state and nnx.split turn "
            'it into dictionaries: pass the objects, state={"model": model, "optimizer": optimizer}'
        )
    if engine.scales_lr and engine.mode != "observe" and nodes(ScaleByHealLrState, tree):
        check_second_iterates(tree, "scale_by_heal_lr")
    items = [_item_of(path) for path in states]
    optimizers = [_optimizer_of(path) for path in states]
    # In a chain with an engine, averages of updates have the structure of the parameters.
    in_chains = [path for path, _ in nodes(_has_no_engine, tree)]
    not_parameters = [*optimizers, *in_chains]
    # The parameters of an engine inside a mask or partition may be no subtree.
    masked = (optax.MaskedState, optax.transforms.PartitionState)
    masks = [path for path, _ in nodes(masked, tree)]
    engines = []
    for item, (path, state) in zip(items, states.items(), strict=True):
        _check_is_one_run(path, state)
        heal_state.engine_state(engine, state)  # raises for another policy
        warn_if_after_optimizer(tree, path)
        name = item
        if items.count(item) > 1:
            name = jax.tree_util.keystr(path)
        count = state.heal_leaf_norms.shape[0]
        candidates = candidates_of(trained(item), count, not_parameters)
        names = tensor_names(candidates, name, path, count, optimizers)
        # Any part outside the optimizers may be the trained parameters.
        outside = []
        for place, tensors in candidates.items():
            if not (is_within(place, not_parameters) or is_within(path, masks)):
                outside.append(tuple(map(jax.tree_util.keystr, tensors)))
        entry = EngineEntry(name, path, names, tuple(outside), node_getter(path))
        engines.append(entry)
    return engines


def has_parameters(tree: PyTree, engines: Sequence[EngineEntry]) -> bool:
    """Whether a state has any floating array outside of the optimizers' states.

    Without the parameters, a restart would continue with old moments and new weights.

    Args:
        tree: the live state, as `ProgramState.read` returns it.
        engines: the engines of this state.
    """
    optimizers = [_optimizer_of(entry.path) for entry in engines]
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = getattr(array_of(leaf), "dtype", None)
        is_floating = dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
        if is_floating and not is_within(path, optimizers):
            return True
    return False


def _item_of(path: Path) -> str:
    """The item of the state that contains the node at a path. A state of one node is `state`."""
    if not path:
        return "state"
    return key_name(path[0])


def _optimizer_of(engine: Path) -> Path:
    """The path of the optimizer state, such as a chain, around a HealState at a path."""
    return engine[: max(1, len(engine) - 1)]


def _check_is_one_run(path: Path, state: HealState) -> None:
    """Raises HealStateError if a HealState has the axis of a `vmap` or `pmap` over runs."""
    if jnp.ndim(state.heal_engine) > 2:
        raise HealStateError(
            f"the healing state at state{jax.tree_util.keystr(path)} holds "
            f"{len(state.heal_engine)} runs at once (a leading axis, from vmap or pmap), and a "
            "Healer saves and restores one run. Without a Healer, protect() heals each lane "
            "separately. For a Healer, pass the state of one run: shard its batch with jit or "
            "shard_map, and run the lanes of a sweep in sequence"
        )


def trains_its_parameters(tree: PyTree, entry: EngineEntry) -> bool:
    """Whether an optimizer's state fits parameters outside of it, as far as the shapes show it.

    Moments have the shapes of their parameters. A tree that a step has returned by mistake has
    other parameters than its optimizer has moments. Without this check, such a tree would become
    the state of the run and would be saved.

    Args:
        tree: a state of another structure than the live one.
        entry: an engine in this state.
    """
    count = node_at(tree, entry.path).heal_leaf_norms.shape[0]
    leaves = jax.tree_util.tree_leaves_with_path(without_heal_state(tree))
    shapes = {path: jnp.shape(leaf) for path, leaf in leaves}
    optimizer = _optimizer_of(entry.path)
    of_moments = []
    of_parameters = []
    for place, tensors in candidates_of(tree, count, [optimizer]).items():
        found = [shapes[path] for path in tensors]
        if is_within(place, [optimizer]):
            of_moments.append(found)
        else:
            of_parameters.append(found)

    def fits(candidate: list[tuple[int, ...]]) -> bool:
        return all(candidate == moments for moments in of_moments)

    return any(map(fits, of_parameters))


def with_engines(
    engine: Engine,
    engines: Sequence[EngineEntry],
    tree: PyTree,
    data: Mapping[str, Mapping[str, Any]],
) -> PyTree:
    """Replaces the engine states that are named in `data`, for a rollback or a resume.

    Also sets the multiplier of `scale_by_heal_lr` if all these engines have the same one, because
    the program copies it from the decision, and the next decision comes after the next step.

    Args:
        engine: the engine of the run's policy.
        engines: the engines of the run.
        tree: the live state.
        data: name of an engine -> its state, as `Engine.to_dict` makes it.

    Returns:
        The new state, with the dtypes, weak types and placement of the live state.

    Raises:
        StateError: a state belongs to another policy or model, or the run has no such engine.
    """
    paths = {entry.name: entry.path for entry in engines}
    check_engines(data, paths)
    states = {name: engine.from_dict(state) for name, state in data.items()}
    new = {}
    for name, state in states.items():
        live = node_at(tree, paths[name])
        packed = heal_state.with_engine_state(engine, live, state)
        new[paths[name]] = jax.tree.map(to_live_leaf, packed, live)
    scales = {float(state.lr.scale) for state in states.values()}
    scale = None
    if len(scales) == 1 and engine.mode != "observe":
        [scale] = scales

    def is_healing(node: PyTree) -> bool:
        return isinstance(node, HealState | ScaleByHealLrState)

    def replaced(path: Path, node: PyTree) -> PyTree:
        if scale is not None and isinstance(node, ScaleByHealLrState):
            return ScaleByHealLrState(to_live_leaf(np.float32(scale), node.heal_lr_scale))
        return new.get(path, node)

    return jax.tree_util.tree_map_with_path(replaced, tree, is_leaf=is_healing)


def map_states(change: Callable[[HealState], HealState], tree: PyTree) -> PyTree:
    """Applies a change to the state of every engine, outside of a compiled step.

    Args:
        change: makes the new HealState of an old one, with the same structure and dtypes.
        tree: the live state.

    Returns:
        The state with the changed HealStates, which are placed on the devices as the old
        HealStates. Otherwise the next step would be compiled again.
    """

    def changed(live: HealState) -> HealState:
        return jax.tree.map(to_live_leaf, change(live), live)

    return map_nodes(HealState, changed, tree)


def edit_numbers(states: Sequence[HealState]) -> list[int]:
    """The number of the Healer's last edit in each state. One sync.

    A rollback edits the state and counts the edit in it. A step keeps the number, so a state with a
    lower number was computed from the state before the rollback, and would undo it.
    """
    arrays = jax.device_get([array_of(state.heal_engine) for state in states])
    return [int(rows[0, engine_rows.EDIT]) for rows in arrays]


def _has_no_engine(node: PyTree) -> bool:
    """Whether a node is the state of an optimizer and contains no engine."""
    return is_optax_state(node) and not nodes(HealState, node)
