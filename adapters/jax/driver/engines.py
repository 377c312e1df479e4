"""The engines of a run: finds, reads and replaces their states in a train state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from healcore.core.engine import Engine
from healcore.jax import state as heal_state
from healcore.jax import state_layout
from healcore.jax.chain_order import warn_if_after_optimizer
from healcore.jax.driver.leaf_form import as_live
from healcore.jax.driver.tensor_names import names
from healcore.jax.lr import ScaleByHealLrState
from healcore.jax.state import HealState, HealStateError
from healcore.runtime.driver import check_engines

Path = tuple[Any, ...]


class EngineEntry(NamedTuple):
    """One engine of the run."""

    name: str
    """Name of the optimizer in the state."""
    path: Path
    """Path to its HealState from the top of the state."""
    leaves: tuple[str, ...]
    """Names of the tensors whose gradients it judges."""


def find(tree: Any, trained: Any, engine: Engine) -> list[EngineEntry]:
    """The engines of a state.

    Args:
        tree: the state.
        trained: a tree with the parameters in it.
        engine: the policy's.

    Raises:
        HealStateError: there is none, or one is of another policy or of several runs at once.
    """
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_heal)
    states = {path: node for path, node in nodes if _is_heal(node)}
    if not states:
        raise HealStateError(
            f"no healing state in this {type(tree).__name__}: the state to heal holds that of an "
            "optimizer made with protect(), heal() or heal_zclip()"
        )
    tops = [_key(path[0]) if path else "state" for path in states]
    found = []
    for top, (path, state) in zip(tops, states.items(), strict=True):
        heal_state.engine_state(engine, state)  # raises unless the policy is that of the optimizer
        _check_single(path, state)
        warn_if_after_optimizer(tree, path)
        name = top if tops.count(top) == 1 else jax.tree_util.keystr(path)
        count = state.heal_leaf_norms.shape[0]
        found.append(EngineEntry(name, path, names(trained, path, count)))
    return found


def at(root: Any, path: Path) -> HealState:
    """The HealState at a path.

    Raises:
        HealStateError: there is no HealState.
    """
    node = root
    try:
        for entry in path:
            node = getattr(node, entry.name) if hasattr(entry, "name") else node[_index(entry)]
    except (AttributeError, LookupError, TypeError):
        node = None
    if not isinstance(node, HealState):
        raise HealStateError(
            f"the healing state is no longer at state{jax.tree_util.keystr(path)}: "
            "update() takes the whole state in the structure that the run began with"
        )
    return node


def dicts(engine: Engine, engines: Sequence[EngineEntry], tree: Any) -> dict[str, dict[str, Any]]:
    """Engine name -> `Engine.to_dict`. Reads the device."""
    states = [heal_state.engine_state(engine, at(tree, each.path)) for each in engines]
    return {
        each.name: engine.to_dict(state)
        for each, state in zip(engines, jax.device_get(states), strict=True)
    }


def loaded(
    engine: Engine, engines: Sequence[EngineEntry], tree: Any, data: Mapping[str, Mapping[str, Any]]
) -> Any:
    """The tree with engine states replaced; those not named stay.

    The multiplier of a `scale_by_heal_lr` is set to the engine's, for the very next step.

    Raises:
        StateError: a state is of another policy or model, or of no engine of this run.
    """
    paths = {each.name: each.path for each in engines}
    check_engines(data, paths)
    states = {name: engine.from_dict(each) for name, each in data.items()}
    new = {
        paths[name]: _packed(engine, at(tree, paths[name]), state) for name, state in states.items()
    }
    scales = {float(state.lr.scale) for state in states.values()}
    scale = scales.pop() if len(scales) == 1 and engine.mode != "observe" else None

    def one(path: Path, node: Any) -> Any:
        if scale is not None and isinstance(node, ScaleByHealLrState):
            return ScaleByHealLrState(as_live(np.float32(scale), node.heal_lr_scale))
        return new.get(path, node)

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=_is_healing)


def with_change_expected(tree: Any) -> Any:
    """The tree with every engine's grace window opened."""

    def one(node: Any) -> Any:
        if not _is_heal(node):
            return node
        ints = as_live(state_layout.with_change_expected(node.heal_ints), node.heal_ints)
        return node._replace(heal_ints=ints)

    return jax.tree.map(one, tree, is_leaf=_is_heal)


def declined(engine: Engine, tree: Any) -> Any:
    """The tree with the rollback that was ordered last cancelled, in every engine."""

    def one(node: Any) -> Any:
        if not _is_heal(node):
            return node
        state = engine.decline(heal_state.engine_state(engine, node), xp=jnp)
        return jax.tree.map(as_live, heal_state.with_engine_state(engine, node, state), node)

    return jax.tree.map(one, tree, is_leaf=_is_heal)


def _check_single(path: Path, state: HealState) -> None:
    """Raises HealStateError for a state with a leading axis, from `vmap` or `pmap`."""
    lanes = jnp.shape(state.heal_decision["heal_skip"])
    if lanes:
        raise HealStateError(
            f"the healing state at state{jax.tree_util.keystr(path)} is that of {lanes[0]} runs at "
            "once: it has a leading axis, as vmap and pmap make it, and a Healer saves and "
            "restores one run. Without a Healer protect() heals each lane by itself. For a Healer "
            "pass the state of one run: shard its batch with jit or shard_map, and run the lanes "
            "of a sweep one after the other"
        )


def _packed(engine: Engine, live: HealState, state: Any) -> HealState:
    """An engine state packed in the form of the live one."""
    new = heal_state.with_engine_state(engine, live, state)
    new = new._replace(heal_decision=heal_state.neutral_decision(live))
    return jax.tree.map(as_live, new, live)


def _index(entry: Any) -> Any:
    return entry.key if hasattr(entry, "key") else entry.idx


def _key(entry: Any) -> str:
    return str(entry.name if hasattr(entry, "name") else _index(entry))


def _is_heal(node: Any) -> bool:
    return isinstance(node, HealState)


def _is_healing(node: Any) -> bool:
    return isinstance(node, (HealState, ScaleByHealLrState))
