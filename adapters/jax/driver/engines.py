"""The engines of a run: where a train state has their states, and changes of these states."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from healcore.core.engine import Engine
from healcore.jax import engine_rows, heal_state, optimizer_numbers
from healcore.jax.array_leaves import is_number
from healcore.jax.driver.live_state import array_of, as_live
from healcore.jax.gradients import is_gradient
from healcore.jax.heal_state import (
    HealState,
    HealStateError,
    ScaleByHealLrState,
    map_nodes,
    nodes,
)
from healcore.jax.opt_state import without_heal_state
from healcore.jax.optax_states import check_second_iterates
from healcore.jax.transform import ProtectState
from healcore.runtime.driver import NumberRange, check_engines

Path = tuple[Any, ...]


class EngineEntry(NamedTuple):
    """One engine of the run."""

    name: str
    path: Path
    """Path of its HealState in the state."""
    leaves: tuple[str, ...]
    """Names of the tensors whose gradients it judges."""
    candidates: tuple[tuple[str, ...], ...]
    """The parts of the state that may be its parameters, or empty if these cannot be identified."""
    state_in: Callable[[Any], HealState]
    """Takes its HealState from the state."""


def find_engines(tree: Any, trained: Callable[[str], Any], engine: Engine) -> list[EngineEntry]:
    """Finds the engines of a state. `trained` maps an item's name to a tree with its parameters.

    Raises HealStateError if the state has no engine, or an engine belongs to another policy or
    holds several runs (`vmap`).
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
    tops = [_name(path[0]) if path else "state" for path in states]
    optimizers = [path[: max(1, len(path) - 1)] for path in states]
    # In a chain with an engine, averages of updates have the structure of the parameters.
    in_chains = [path for path, _ in nodes(_is_beside_engine, tree)]
    # The parameters of an engine inside a mask or partition may be no subtree.
    masks = [p for p, _ in nodes((optax.MaskedState, optax.transforms.PartitionState), tree)]
    engines = []
    for top, (path, state) in zip(tops, states.items(), strict=True):
        if jnp.ndim(state.heal_engine) > 2:
            raise HealStateError(
                f"the healing state at state{jax.tree_util.keystr(path)} holds "
                f"{len(state.heal_engine)} runs at once (a leading axis, from vmap or pmap), and a "
                "Healer saves and restores one run. Without a Healer, protect() heals each lane "
                "separately. For a Healer, pass the state of one run: shard its batch with jit or "
                "shard_map, and run the lanes of a sweep in sequence"
            )
        heal_state.engine_state(engine, state)  # raises for another policy
        heal_state.warn_if_after_optimizer(tree, path)
        name = top if tops.count(top) == 1 else jax.tree_util.keystr(path)
        count = state.heal_leaf_norms.shape[0]
        parts = _parts(trained(top), count, [*optimizers, *in_chains])
        names = _tensor_names(parts, name, path, count, optimizers)
        # Any part outside the optimizers may be the trained parameters.
        outside = tuple(
            tuple(map(jax.tree_util.keystr, part))
            for place, part in parts.items()
            if not (_within(place, [*optimizers, *in_chains]) or _within(path, masks))
        )
        engines.append(EngineEntry(name, path, names, outside, heal_state.node_getter(path)))
    return engines


def trains_its_parameters(tree: Any, entry: EngineEntry) -> bool:
    """Whether an optimizer's state fits parameters outside of it, as far as the shapes show it.

    Moments have the shapes of their parameters. A tree that a step has returned by mistake has
    other parameters than its optimizer has moments.
    """
    count = heal_state.node_at(tree, entry.path).heal_leaf_norms.shape[0]
    leaves = jax.tree_util.tree_leaves_with_path(without_heal_state(tree))
    shapes = {path: jnp.shape(leaf) for path, leaf in leaves}
    optimizer = entry.path[: max(1, len(entry.path) - 1)]
    inside, outside = [], []
    for place, paths in _parts(tree, count, [optimizer]).items():
        kind = inside if _within(place, [optimizer]) else outside
        kind.append([shapes[path] for path in paths])
    return any(all(part == moments for moments in inside) for part in outside)


def with_engines(
    engine: Engine, engines: Sequence[EngineEntry], tree: Any, data: Mapping[str, Mapping[str, Any]]
) -> Any:
    """The tree with the engine states named in `data`, and the multiplier of `scale_by_heal_lr`.

    Raises StateError if a state belongs to another policy or model, or the run has no such engine.
    """
    paths = {engine.name: engine.path for engine in engines}
    check_engines(data, paths)
    states = {name: engine.from_dict(state) for name, state in data.items()}
    new = {}
    for name, state in states.items():
        live = heal_state.node_at(tree, paths[name])
        packed = heal_state.with_engine_state(engine, live, state)
        new[paths[name]] = jax.tree.map(as_live, packed, live)
    scales = {float(state.lr.scale) for state in states.values()}
    scale = scales.pop() if len(scales) == 1 and engine.mode != "observe" else None

    def one(path: Path, node: Any) -> Any:
        if scale is not None and isinstance(node, ScaleByHealLrState):
            return ScaleByHealLrState(as_live(np.float32(scale), node.heal_lr_scale))
        return new.get(path, node)

    return jax.tree_util.tree_map_with_path(
        one, tree, is_leaf=lambda node: isinstance(node, (HealState, ScaleByHealLrState))
    )


def map_states(change: Callable[[HealState], HealState], tree: Any) -> Any:
    """Applies `change`, which keeps structure and dtypes, to the state of every engine."""
    return map_nodes(HealState, lambda live: jax.tree.map(as_live, change(live), live), tree)


def edit_numbers(states: Sequence[HealState]) -> list[int]:
    """The number of the last edit in each state. One sync."""
    arrays = jax.device_get([array_of(state.heal_engine) for state in states])
    return [int(rows[0, engine_rows.EDIT]) for rows in arrays]


# -- numbers of the optimizers -----------------------------------------------------------------


def numbers_of(engines: Sequence[EngineEntry], tree: Any) -> dict[str, NumberRange]:
    """The ranges of the injected numbers of all engines, see `Driver.numbers`. One sync."""
    names = _number_names(engines, tree)
    arrays = [heal_state.node_at(tree, path).heal_numbers for path in names]
    return {
        name: NumberRange(*each)
        for part, array in zip(names.values(), jax.device_get(arrays), strict=True)
        for name, each in zip(part, optimizer_numbers.seen(array), strict=True)
        if each is not None
    }


def suspect_numbers(tree: Any) -> list[str]:
    """See `Driver.suspect_numbers`. One sync."""
    found = optimizer_numbers.injected_leaves(tree)
    names = [str(getattr(path[-1], "key", "")) for path in found]
    values = dict(zip(names, map(float, jax.device_get([*found.values()])), strict=True))
    bad = {name: value for name, value in values.items() if not math.isfinite(value)}
    # A decay of 1 forgets nothing, and its bias correction divides by 0, as an eps of 0 does.
    bad = bad or {name: value for name, value in values.items() if value == 1}
    bad = bad or {name: value for name, value in values.items() if name == "eps" and not value}
    return [f"{name} is {value}" for name, value in bad.items()]


def with_held_numbers(
    engines: Sequence[EngineEntry], tree: Any, ranges: Mapping[str, NumberRange]
) -> Any:
    """The tree that holds the numbers in `ranges` and releases all others, or None.

    None if the tree has no numbers, or if it holds them already and has seen no step since. One
    sync.
    """
    new = {
        path: optimizer_numbers.held([ranges.get(name) for name in names])
        for path, names in _number_names(engines, tree).items()
    }
    old = jax.device_get([heal_state.node_at(tree, path).heal_numbers for path in new])
    if all(np.array_equal(*pair, equal_nan=True) for pair in zip(old, new.values(), strict=True)):
        return None

    def one(path: Path, node: Any) -> Any:
        if path not in new:
            return node
        return node._replace(heal_numbers=as_live(new[path], node.heal_numbers))

    return jax.tree_util.tree_map_with_path(
        one, tree, is_leaf=lambda node: isinstance(node, HealState)
    )


def _number_names(engines: Sequence[EngineEntry], tree: Any) -> dict[Path, list[str]]:
    """Path of each HealState with numbers -> the names of its numbers, in their order.

    A name is the argument of the optimizer, such as `b2`, or its path if an argument of this name
    occurs twice.
    """
    found: dict[Path, list[Path]] = {}
    for entry in engines:
        owner = heal_state.node_at(tree, entry.path[:-1])
        if isinstance(owner, ProtectState) and owner.heal.heal_numbers is not None:
            start = (*entry.path[:-1], jax.tree_util.GetAttrKey("inner_state"))
            places = optimizer_numbers.number_leaves(owner.inner_state)
            found[entry.path] = [(*start, *place) for place in places]
    short = [_name(place[-1]) for places in found.values() for place in places]
    is_unique = len({*short}) == len(short)
    name = (lambda place: _name(place[-1])) if is_unique else jax.tree_util.keystr
    return {path: [name(place) for place in places] for path, places in found.items()}


# -- tensors of an engine -----------------------------------------------------------------------


def _parts(tree: Any, count: int, optimizers: Sequence[Path]) -> dict[Path, list[Path]]:
    """Path of each outermost subtree with `count` floating tensors -> paths of these tensors.

    A Python number may be a parameter. If then no part outside of the optimizers fits, it is none:
    the rate of a dropout layer is a leaf of an Equinox module.
    """
    leaves = jax.tree_util.tree_leaves_with_path(without_heal_state(tree))
    floating = [(path, leaf) for path, leaf in leaves if is_gradient(leaf)]
    parts = _outermost([path for path, _ in floating], count)
    if all(_within(place, optimizers) for place in parts):
        parts = _outermost([path for path, x in floating if not is_number(x)], count)
    return parts


def _outermost(tensors: Sequence[Path], count: int) -> dict[Path, list[Path]]:
    """Path of each outermost subtree with `count` of the tensors -> paths of these tensors."""
    parts: dict[Path, list[Path]] = {}
    for path in tensors:
        for depth in range(len(path) + 1):
            parts.setdefault(path[:depth], []).append(path)
    fitting = {path: leaves for path, leaves in parts.items() if len(leaves) == count}
    return {
        path: leaves for path, leaves in fitting.items() if not path or path[:-1] not in fitting
    }


def _tensor_names(
    parts: Mapping[Path, Sequence[Path]],
    name: str,
    engine: Path,
    count: int,
    optimizers: Sequence[Path],
) -> tuple[str, ...]:
    """Names (paths) of the tensors that an engine judges, or numbers if the names are ambiguous.

    An optimizer state does not name the subtree that it optimizes. Candidates are the `parts` with
    `count` floating tensors, one for each gradient of the engine. The most likely candidate is
    called `params` or `model`, is outside the optimizers, and its path is similar to `engine`, the
    path of the HealState. If two networks are equally likely, names start with the engine's name.
    """

    def unlikely(path: Path) -> tuple[bool, bool, int]:
        is_named = bool(path) and _name(path[-1]) in ("params", "model")
        alike = sum(one == other for one, other in zip(path, engine, strict=False))
        return not is_named, _within(path, optimizers), -alike

    best = min(map(unlikely, parts), default=None)
    likeliest = [path for path in parts if unlikely(path) == best]
    if len(likeliest) == 1:
        return tuple(jax.tree_util.keystr(leaf) for leaf in parts[likeliest[0]])
    within = {tuple(leaf[len(path) :] for leaf in parts[path]) for path in likeliest}
    if len(within) == 1 and all(next(iter(within))):
        return tuple(f"{name}: {jax.tree_util.keystr(leaf)}" for leaf in within.pop())
    which = f"{name}: " if len(optimizers) > 1 else ""
    return tuple(f"{which}gradient {i} of {count}" for i in range(count))


def _is_beside_engine(node: Any) -> bool:
    return heal_state.is_optax_state(node) and not nodes(HealState, node)


def _within(path: Path, others: Sequence[Path]) -> bool:
    return any(path[: len(other)] == other for other in others)


def _name(key: Any) -> str:
    return str(next(getattr(key, kind) for kind in ("name", "key", "idx") if hasattr(key, kind)))
