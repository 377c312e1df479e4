"""Finds Adam's second moments in a saved tree, or the reason why it has none."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from healcore.plugins.checkpoint_contents import Array, Contents

Path = tuple[str, ...]

_FACTORED = "Adafactor has factored second moments, not one per element"
_SGD = "SGD with momentum has no second moments"
_MOMENTUM = "the state has momentum without second moments, as in Lion and Muon"
_UNLIKE = "is not like Adam"

_TORCH = {
    "exp_avg_sq_row": _FACTORED,
    "row_var": _FACTORED,
    "momentum_buffer": _SGD,
    "exp_avg_var": f"AdaBelief saves the variance of gradients and {_UNLIKE}",
    "square_avg": f"RMSprop (or Adadelta) {_UNLIKE}",
    "sum": f"Adagrad {_UNLIKE}",
    "exp_inf": f"Adamax {_UNLIKE}",
    "step_size": f"Rprop {_UNLIKE}",
    "hessian": f"Sophia {_UNLIKE}",
    "exp_avg": _MOMENTUM,
    "state1": _MOMENTUM,
}
"""Reason by the last part of a path below `state`. The first matching entry applies."""
_OPTAX = {
    "v_row": _FACTORED,
    "trace": _SGD,
    "sum_of_squares": f"Adagrad {_UNLIKE}",
    "nu": f"RMSprop, or another state with nu but without mu of the same shape, {_UNLIKE}",
    "mu": _MOMENTUM,
}
"""Reason by any part of a path except the first."""
_QUANTIZED = "8-bit states ({}) are quantized: dequantize them to judge them"

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
    """Number of updates. `step`, `beta2` and `group` are None if the state lacks the value."""
    beta2: float | None
    group: int | None = None


class Tree:
    """The contents of a checkpoint by path."""

    def __init__(self, contents: Contents) -> None:
        self.arrays: dict[Path, Array] = {}
        for array in contents.arrays:
            path = array.path
            if path:
                self.arrays[path[:-1] if len(path) > 1 and path[-1] in _WRAPPERS else path] = array
        self.values: Mapping[Path, Any] = contents.values
        self.groups: dict[Path, dict[str, int]] = {}
        """Index of the parameter group by optimizer and parameter."""
        for path, value in self.values.items():
            table, group, kind = path[-4:-1] if len(path) > 3 else ("", "", "")
            is_member = table == "param_groups" and kind == "params"
            if is_member and group.isdecimal() and len(group) < 10:
                self.groups.setdefault(path[:-4], {})[str(value)] = int(group)

    def number(self, path: Path) -> float | None:
        """Returns a value saved as a number or as an array of one element, or None."""
        value = self.values.get(path)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value) if abs(value) < 1e300 else math.inf
        array = self.arrays.get(path)
        return array.scalar() if array is not None and array.size == 1 else None


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
        optimizer, parameter = _split(state)
        group = tree.groups.get(optimizer, {}).get(".".join(parameter))
        yield AdamState(
            optimizer,
            parameter,
            array,
            tuple(tree.arrays[(*state, name)] for name in names if (*state, name) in tree.arrays),
            _number(tree, (*state, "step"), *_group_paths(optimizer, parameter, group, "step")),
            _number(tree, *_group_paths(optimizer, parameter, group, "betas", "1")),
            group,
        )


def _optax_states(tree: Tree) -> Iterator[AdamState]:
    for path, array in tree.arrays.items():
        for at in (at for at, name in enumerate(path) if name == "nu"):
            optimizer, parameter = path[:at], path[at + 1 :]
            first = tree.arrays.get((*optimizer, "mu", *parameter))
            if first is None or first.shape != array.shape:
                continue
            largest = tree.arrays.get((*optimizer, "nu_max", *parameter))
            parents = (optimizer[:end] for end in range(len(optimizer), -1, -1))
            yield AdamState(
                optimizer,
                parameter,
                array,
                (first,) if largest is None else (first, largest),
                tree.number((*optimizer, "count")),
                _number(tree, *((*parent, "hyperparams", "b2") for parent in parents)),
            )
            break


def _split(path: Path) -> tuple[Path, Path]:
    """Splits a path into optimizer and parameter at the last key `state`."""
    for at in range(len(path) - 2, -1, -1):
        if path[at] == "state":
            return path[:at], path[at + 1 :]
    return path[:-1], path[-1:]


def _group_paths(optimizer: Path, parameter: Path, group: int | None, *keys: str) -> Iterator[Path]:
    """Yields possible paths of a hyper-parameter: in the parameter's group, or per parameter."""
    if group is not None:
        yield (*optimizer, "param_groups", str(group), *keys)
    yield (*optimizer, "param_groups", *parameter, *keys)


def _number(tree: Tree, *paths: Path) -> float | None:
    return next((number for path in paths if (number := tree.number(path)) is not None), None)


def unsupported_optimizer(tree: Tree, judged: Collection[Array]) -> str | None:
    """Reason why some optimizer states cannot be judged, or None if `judged` are all states."""
    judged_paths = {array.path for array in judged}
    below_state, anywhere = set(), set()
    for path, array in tree.arrays.items():
        if array.path in judged_paths:
            continue
        if array.dtype in ("uint8", "int8") and path[-1] in ("state1", "state2"):
            return _QUANTIZED.format("bitsandbytes")
        if array.dtype in ("uint8", "int8") and path[-1] == "codes":
            return _QUANTIZED.format("torchao")
        if "state" in path[:-1]:
            below_state.add(path[-1])
        anywhere.update(name for name in path[1:] if name != "mu" or _has_count(tree, path))
    return next(
        (
            reason
            for names, table in ((below_state, _TORCH), (anywhere, _OPTAX))
            for name, reason in table.items()
            if name in names
        ),
        None,
    )


def _has_count(tree: Tree, path: Path) -> bool:
    """Whether `mu` has a sibling `count`; without `count`, `mu` may be a parameter."""
    return (*path[: path.index("mu")], "count") in tree.arrays
