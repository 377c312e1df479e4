"""Finding second moments in a saved tree: torch's `exp_avg_sq`, optax's `nu`, wherever they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from healcore.tools.probe.contents import Array, Contents

Path = tuple[str, ...]

_WRAPPED = ("value", "raw_value")
"""What flax.nnx puts around an array."""


class Slot(NamedTuple):
    """What an optimizer of Adam's kind keeps for one parameter."""

    optimizer: Path
    """Where the state of its optimizer lies."""
    parameter: Path
    """Which parameter: its path, or its number."""
    second: Array
    """The running average of squared gradients."""
    beside: tuple[Array, ...]
    """Other moments: they must be finite too."""
    step: float | None
    """None: the state does not say."""
    beta2: float | None
    group: int | None = None
    """Of torch's parameter groups."""


class Tree:
    """Contents by path."""

    def __init__(self, contents: Contents) -> None:
        self.arrays: dict[Path, Array] = {
            _bare(array.path): array for array in contents.arrays if array.path
        }
        self.values: Mapping[Path, Any] = contents.values
        self.groups: dict[Path, dict[str, int]] = {}
        """Of each optimizer which group each of its parameters is in."""
        for path, value in self.values.items():
            list_, group, kind = path[-4:-1] if len(path) > 3 else ("", "", "")
            known = list_ == "param_groups" and kind == "params"
            if known and group.isdecimal() and len(group) < 10:
                self.groups.setdefault(path[:-4], {})[str(value)] = int(group)

    def number(self, path: Path) -> float | None:
        """A number, whether it was saved as one or as an array of one element."""
        value = self.values.get(path)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value) if abs(value) < 1e300 else math.inf
        array = self.arrays.get(path)
        return array.scalar() if array is not None and array.size == 1 else None


def slots(tree: Tree) -> list[Slot]:
    """All of them, in the order in which they were saved."""
    return [*_torch_slots(tree), *_optax_slots(tree)]


def _torch_slots(tree: Tree) -> Iterator[Slot]:
    for path, array in tree.arrays.items():
        # bitsandbytes calls them state1 and state2; the 8-bit ones are whole numbers.
        if path[-1] == "exp_avg_sq":
            names = ("exp_avg", "max_exp_avg_sq")
        elif path[-1] == "state2" and "float" in array.dtype:
            names = ("state1",)
        else:
            continue
        at = path[:-1]
        optimizer, parameter = _cut(at)
        group = tree.groups.get(optimizer, {}).get(".".join(parameter))
        yield Slot(
            optimizer,
            parameter,
            array,
            tuple(tree.arrays[(*at, name)] for name in names if (*at, name) in tree.arrays),
            _first(tree, (*at, "step"), *_of_group(optimizer, parameter, group, "step")),
            _first(tree, *_of_group(optimizer, parameter, group, "betas", "1")),
            group,
        )


def _optax_slots(tree: Tree) -> Iterator[Slot]:
    for path, array in tree.arrays.items():
        for at in (at for at, name in enumerate(path) if name == "nu"):
            optimizer, parameter = path[:at], path[at + 1 :]
            first = tree.arrays.get((*optimizer, "mu", *parameter))
            if first is None or first.shape != array.shape:
                continue
            largest = tree.arrays.get((*optimizer, "nu_max", *parameter))
            given = (optimizer[:end] for end in range(len(optimizer), -1, -1))
            yield Slot(
                optimizer,
                parameter,
                array,
                (first,) if largest is None else (first, largest),
                tree.number((*optimizer, "count")),
                _first(tree, *((*above, "hyperparams", "b2") for above in given)),
            )
            break


def _cut(path: Path) -> tuple[Path, Path]:
    """Into the optimizer and the parameter: at the last `state` that is not the end."""
    for at in range(len(path) - 2, -1, -1):
        if path[at] == "state":
            return path[:at], path[at + 1 :]
    return path[:-1], path[-1:]


def _of_group(optimizer: Path, parameter: Path, group: int | None, *keys: str) -> Iterator[Path]:
    """Where a hyper-parameter may be: in the parameter's group, or flattened by parameter."""
    if group is not None:
        yield (*optimizer, "param_groups", str(group), *keys)
    yield (*optimizer, "param_groups", *parameter, *keys)


def _first(tree: Tree, *paths: Path) -> float | None:
    return next((found for path in paths if (found := tree.number(path)) is not None), None)


def _bare(path: Path) -> Path:
    return path[:-1] if len(path) > 1 and path[-1] in _WRAPPED else path
