"""The numbers of the optimizers of a run, such as `b2` or the weight decay: their ranges.

A number that leaves the range in which the run was healthy can be the reason for damage. The Healer
asks for the ranges (`numbers_of`), and after a rollback it holds a number in its healthy range
(`with_held_numbers`). Only numbers of `optax.inject_hyperparams` within `protect` can be held,
because no other number is in the state. `healcore.jax.optimizer_numbers` does this in the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from healcore.jax import optimizer_numbers
from healcore.jax.driver.engines import EngineEntry
from healcore.jax.driver.program_state import key_name, to_live_leaf
from healcore.jax.heal_state import HealState, ProtectState
from healcore.jax.trees import Path, PyTree, node_at
from healcore.runtime.driver import NumberRange


def numbers_of(engines: Sequence[EngineEntry], tree: PyTree) -> dict[str, NumberRange]:
    """Reads the ranges of the injected numbers of all engines. One sync.

    The Healer calls this while the run is healthy, and keeps the result with its copy of the
    weights, see `Driver.numbers`.

    Args:
        engines: the engines of the run.
        tree: the live state.

    Returns:
        Name of each number that a step has seen -> its lowest, highest and newest value.
    """
    names_of = _number_names(engines, tree)
    arrays = [node_at(tree, path).heal_numbers for path in names_of]
    ranges = {}
    for names, array in zip(names_of.values(), jax.device_get(arrays), strict=True):
        for name, seen in zip(names, optimizer_numbers.read_ranges(array), strict=True):
            if seen is not None:
                ranges[name] = NumberRange(*seen)
    return ranges


def suspect_numbers(tree: PyTree) -> list[str]:
    """Names the injected numbers that can make NaN of finite gradients. One sync.

    The Healer calls this when an optimizer has made NaN or Inf, to name the reason in the alarm.
    It names numbers that are not finite, else numbers that are 1 (a decay of 1 forgets nothing, and
    its bias correction divides by 0), else an `eps` of 0, which divides by 0 too.

    Args:
        tree: the live state.

    Returns:
        Texts such as "b2 is 1.0", or an empty list.
    """
    leaves = optimizer_numbers.injected_leaves(tree)
    values: dict[str, float] = {}
    for path, value in zip(leaves, jax.device_get([*leaves.values()]), strict=True):
        values[str(getattr(path[-1], "key", ""))] = float(value)

    def is_not_finite(name: str) -> bool:
        return not math.isfinite(values[name])

    def is_one(name: str) -> bool:
        return values[name] == 1

    def is_eps_of_zero(name: str) -> bool:
        return name == "eps" and values[name] == 0

    for is_suspect in (is_not_finite, is_one, is_eps_of_zero):
        names = [name for name in values if is_suspect(name)]
        if names:
            return [f"{name} is {values[name]}" for name in names]
    return []


def with_held_numbers(
    engines: Sequence[EngineEntry], tree: PyTree, ranges: Mapping[str, NumberRange]
) -> PyTree | None:
    """Holds the numbers in `ranges`, and releases all other numbers. One sync.

    Args:
        engines: the engines of the run.
        tree: the live state.
        ranges: name of a number, as in `numbers_of` -> the range in which it was healthy.

    Returns:
        The new state. None if the tree has no numbers, or if it holds them already and has seen no
        step since: the Healer then does not edit the state.
    """
    new = {}
    for path, names in _number_names(engines, tree).items():
        new[path] = optimizer_numbers.make_numbers([ranges.get(name) for name in names])
    old = jax.device_get([node_at(tree, path).heal_numbers for path in new])
    is_same = True
    for before, after in zip(old, new.values(), strict=True):
        is_same = is_same and np.array_equal(before, after, equal_nan=True)
    if is_same:
        return None

    def is_heal_state(node: PyTree) -> bool:
        return isinstance(node, HealState)

    def with_numbers(path: Path, node: PyTree) -> PyTree:
        if path not in new:
            return node
        return node._replace(heal_numbers=to_live_leaf(new[path], node.heal_numbers))

    return jax.tree_util.tree_map_with_path(with_numbers, tree, is_leaf=is_heal_state)


def _number_names(engines: Sequence[EngineEntry], tree: PyTree) -> dict[Path, list[str]]:
    """Path of each HealState with numbers -> the names of its numbers, in their order.

    A name is the argument of the optimizer, such as `b2`, or its path if an argument of this name
    occurs twice.
    """
    paths_of: dict[Path, list[Path]] = {}
    for entry in engines:
        owner = node_at(tree, entry.path[:-1])
        if isinstance(owner, ProtectState) and owner.heal.heal_numbers is not None:
            start = (*entry.path[:-1], jax.tree_util.GetAttrKey("inner_state"))
            places = optimizer_numbers.number_leaves(owner.inner_state)
            paths_of[entry.path] = [(*start, *place) for place in places]

    def short_name(path: Path) -> str:
        return key_name(path[-1])

    short = []
    for paths in paths_of.values():
        short += map(short_name, paths)
    name_of: Callable[[Path], str] = jax.tree_util.keystr
    if len(set(short)) == len(short):
        name_of = short_name
    return {engine: list(map(name_of, paths)) for engine, paths in paths_of.items()}
