"""The numbers of the optimizers of a run, such as `b2` or the weight decay: their ranges.

A number that leaves the range in which the run was healthy can be the reason for damage. The Healer
asks for the ranges (`numbers_of`), and after a rollback it holds a number in its healthy range
(`with_held_numbers`). Only numbers of `optax.inject_hyperparams` within `protect` can be held,
because no other number is in the state. `healcore.jax.optimizer_numbers` does this in the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from healcore.jax import optimizer_numbers
from healcore.jax.driver.engines import EngineEntry, map_states
from healcore.jax.driver.program_state import short_names
from healcore.jax.heal_state import HealState
from healcore.jax.trees import Path, PyTree
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
    arrays = []
    for entry in engines:
        if entry.name in names_of:
            arrays.append(entry.state_in(tree).heal_numbers)
    ranges = {}
    for names, array in zip(names_of.values(), jax.device_get(arrays), strict=True):
        for name, seen in zip(names, optimizer_numbers.read_ranges(array), strict=True):
            if seen is not None:
                ranges[name] = NumberRange(*seen)
    return ranges


def with_held_numbers(
    engines: Sequence[EngineEntry], tree: PyTree, ranges: Mapping[str, NumberRange]
) -> PyTree:
    """Holds the numbers in `ranges`, and releases all other numbers. One sync.

    Args:
        engines: the engines of the run.
        tree: the live state.
        ranges: name of a number, as in `numbers_of` -> the range in which it was healthy.

    Returns:
        The new state.
    """
    names_of = _number_names(engines, tree)
    entries = iter(engines)  # in the order of the tree

    def held(state: HealState) -> HealState:
        names = names_of.get(next(entries).name)
        if names is None:
            return state
        numbers = optimizer_numbers.make_numbers([ranges.get(name) for name in names])
        return state._replace(heal_numbers=numbers)

    return map_states(held, tree)


def _number_names(engines: Sequence[EngineEntry], tree: PyTree) -> dict[str, list[str]]:
    """Name of each engine with numbers -> the names of its numbers, in their order.

    A name is the argument of the optimizer, such as `b2`, or its path if an argument of this name
    occurs twice.
    """
    paths_of: dict[str, list[Path]] = {}
    for entry in engines:
        owner = entry.protected(tree)
        if owner is not None and owner.heal.heal_numbers is not None:
            start = (*entry.path[:-1], jax.tree_util.GetAttrKey("inner_state"))
            places = optimizer_numbers.number_leaves(owner.inner_state)
            paths_of[entry.name] = [(*start, *place) for place in places]
    names = iter(short_names([path for paths in paths_of.values() for path in paths]))
    return {engine: [next(names) for _ in paths] for engine, paths in paths_of.items()}
