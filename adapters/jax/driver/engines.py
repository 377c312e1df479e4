"""Finds, reads and replaces the states of a run's engines in a train state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from healcore.core.engine import Engine
from healcore.jax import heal_state
from healcore.jax.driver.live_state import array_of, as_live
from healcore.jax.gradients import is_gradient
from healcore.jax.heal_state import HealState, HealStateError, map_nodes, nodes
from healcore.jax.opt_state import without_heal_state
from healcore.jax.optax_states import ScaleByHealLrState, check_second_iterates, has_lr_scale
from healcore.runtime.driver import check_engines

Path = tuple[Any, ...]
_PARAMETERS = ("params", "model")


class EngineEntry(NamedTuple):
    """One engine of the run."""

    name: str
    path: Path
    """Path of its HealState in the state."""
    leaves: tuple[str, ...]
    """Names of the tensors whose gradients it judges."""
    candidates: tuple[tuple[str, ...], ...]
    """The parts of the state that may be its parameters, or empty if these cannot be identified."""


def find(tree: Any, trained: Any, engine: Engine) -> list[EngineEntry]:
    """Finds the engines of a state. `trained` is a tree that contains the parameters.

    Raises HealStateError if the state has no engine, or an engine belongs to another policy or
    holds several runs (`vmap`).
    """
    states = dict(nodes(HealState, tree))
    if not states:
        raise HealStateError(
            f"no healing state in this {type(tree).__name__}: pass a state that contains the state "
            "of an optimizer with protect(), heal() or heal_zclip()"
        )
    if engine.scales_lr and engine.mode != "observe" and has_lr_scale(tree):
        check_second_iterates(tree, "scale_by_heal_lr")
    tops = [_name(path[0]) if path else "state" for path in states]
    optimizers = [path[: max(1, len(path) - 1)] for path in states]
    # The parameters of an engine inside a mask or partition may be no subtree.
    masks = [p for p, _ in nodes((optax.MaskedState, optax.transforms.PartitionState), tree)]
    found = []
    for top, (path, state) in zip(tops, states.items(), strict=True):
        if jnp.ndim(state.heal_engine) > 1:
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
        parts = _parts(trained, count)
        names = _tensor_names(parts, name, path, count, optimizers)
        # Any part outside the optimizers may be the trained parameters.
        outside = tuple(
            tuple(map(jax.tree_util.keystr, part))
            for place, part in parts.items()
            if not (_within(place, optimizers) or _within(path, masks))
        )
        found.append(EngineEntry(name, path, names, outside))
    return found


def at(root: Any, path: Path) -> HealState:
    """The HealState at a path. Raises HealStateError if it is missing."""
    try:
        node = heal_state.at(root, path)
    except (AttributeError, LookupError, TypeError):
        node = None
    if not isinstance(node, HealState):
        raise HealStateError(
            f"the healing state is missing at state{jax.tree_util.keystr(path)}: "
            "update() takes the whole state, in the structure with which the run started"
        )
    return node


def loaded(
    engine: Engine, engines: Sequence[EngineEntry], tree: Any, data: Mapping[str, Mapping[str, Any]]
) -> Any:
    """The tree with the engine states named in `data`, and the multiplier of `scale_by_heal_lr`.

    Raises StateError if a state belongs to another policy or model, or the run has no such engine.
    """
    paths = {each.name: each.path for each in engines}
    check_engines(data, paths)
    states = {name: engine.from_dict(each) for name, each in data.items()}
    new = {}
    for name, state in states.items():
        live = at(tree, paths[name])
        packed = heal_state.with_engine_state(live, state)
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


def accumulators(tree: Any) -> list[optax.MultiStepsState]:
    """The states of optax.MultiSteps around an engine, which hide micro-batches from the engine.

    One NaN stays in such an accumulator, unless its `skip_state` is not empty.
    """
    return [each for _, each in nodes(optax.MultiStepsState, tree) if nodes(HealState, each)]


def edited(change: Callable[[HealState], HealState], tree: Any) -> Any:
    """Applies a change of one array's values to every engine."""
    return map_nodes(HealState, lambda live: jax.tree.map(as_live, change(live), live), tree)


def edits(states: Sequence[HealState]) -> list[int]:
    """The number of the last edit in each state. One sync."""
    found = [heal_state.edit(array_of(each.heal_engine)) for each in states]
    return [int(each) for each in jax.device_get(found)]


# -- tensors of an engine -----------------------------------------------------------------------


def _parts(tree: Any, count: int) -> dict[Path, list[Path]]:
    """Path of each outermost subtree with `count` floating tensors -> paths of these tensors."""
    parts: dict[Path, list[Path]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(without_heal_state(tree)):
        if is_gradient(leaf):
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
        is_named = bool(path) and _name(path[-1]) in _PARAMETERS
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


def _within(path: Path, others: Sequence[Path]) -> bool:
    return any(path[: len(each)] == each for each in others)


def _name(key: Any) -> str:
    return str(next(getattr(key, kind) for kind in ("name", "key", "idx") if hasattr(key, kind)))
