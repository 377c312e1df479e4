"""Finds Adam's second moments in a saved tree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from healcore.plugins.checkpoint_contents import Array, Contents

Path = tuple[str, ...]

_WRAPPERS = ("value", "raw_value")
"""Keys under which flax.nnx stores an array."""


class AdamState(NamedTuple):
    """State of an Adam-like optimizer for one parameter."""

    optimizer: Path
    parameter: Path
    """Path or number of the parameter."""
    second: Array
    """Second moments."""
    others: tuple[Array, ...]
    """The other moments, which must also be finite."""
    step: float | None
    """Number of updates, or None if the state lacks the value, as `beta2`."""
    beta2: float | None


class Tree:
    """The contents of a checkpoint by path."""

    def __init__(self, contents: Contents) -> None:
        self.arrays: dict[Path, Array] = {}
        for array in contents.arrays:
            path = array.path
            if path:
                self.arrays[path[:-1] if len(path) > 1 and path[-1] in _WRAPPERS else path] = array
        self.values: Mapping[Path, Any] = contents.values
        self.groups: dict[Path, dict[str, str]] = {}
        """Index of the parameter group by optimizer and parameter, in the optimizer's order."""
        for path, value in self.values.items():
            if path[-4:-3] == ("param_groups",) and path[-2] == "params":
                self.groups.setdefault(path[:-4], {})[str(value)] = path[-3]

    def number(self, *paths: Path) -> float | None:
        """Returns the first value saved as a number or as an array of one element, or None."""
        for path in paths:
            value = self.values.get(path)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return float(value) if abs(value) < 1e300 else math.inf
            array = self.arrays.get(path)
            if array is not None and array.size == 1:
                return array.scalar()
        return None


def adam_states(tree: Tree) -> list[AdamState]:
    """Finds all states of Adam-like optimizers: torch states, then optax states, in saved order."""
    return [*_torch_states(tree), *_optax_states(tree)]


def _torch_states(tree: Tree) -> Iterator[AdamState]:
    for path, array in tree.arrays.items():
        # bitsandbytes names the moments state1 and state2; its 8-bit states are integers.
        if path[-1] == "exp_avg_sq":
            names = ("exp_avg", "max_exp_avg_sq")
        elif path[-1] == "state2" and "float" in array.dtype:
            names = ("state1",)
        else:
            continue
        state = path[:-1]
        at = max(
            (at for at, key in enumerate(state[:-1]) if key == "state"), default=len(state) - 1
        )
        optimizer, parameter = state[:at], state[at + 1 :] or state[at:]
        name = ".".join(parameter)
        group = tree.groups.get(optimizer, {}).get(name, name)
        hyper = (*optimizer, "param_groups", *group.split("."))
        yield AdamState(
            optimizer,
            parameter,
            array,
            tuple(tree.arrays[(*state, name)] for name in names if (*state, name) in tree.arrays),
            tree.number((*state, "step"), (*hyper, "step")),
            tree.number((*hyper, "betas", "1")),
        )


def _optax_states(tree: Tree) -> Iterator[AdamState]:
    for path, array in tree.arrays.items():
        for at in (at for at, name in enumerate(path) if name == "nu"):
            optimizer, parameter = path[:at], path[at + 1 :]
            first = tree.arrays.get((*optimizer, "mu", *parameter))
            if first is None or first.shape != array.shape:
                continue
            largest = tree.arrays.get((*optimizer, "nu_max", *parameter))
            others = (first,) if largest is None else (first, largest)
            step = tree.number((*optimizer, "count"))
            yield AdamState(optimizer, parameter, array, others, step, None)
            break
