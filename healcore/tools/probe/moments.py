"""Finds and measures the moments of Adam-like optimizers in a saved tree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from healcore.plugins.checkpoint_contents import Array, Contents, dotted

Path = tuple[str, ...]
Shape = tuple[int, ...]

_WRAPPERS = ("value", "raw_value")
"""Keys under which flax.nnx stores an array."""
_BETA2 = 0.999
"""Adam's beta2 if the state does not contain it, as the states of optax."""


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


@dataclass
class Moments:
    """Adam's moments of one parameter."""

    optimizer: Path
    key: str
    """Dotted path of the parameter, or its number."""
    second: Array
    others: tuple[Array, ...]
    """The other moments, which must also be finite."""
    step: float | None
    """Number of updates, or None if the state lacks the value."""
    beta2: float

    name: str = ""
    """Name of the parameter, or its group and number."""
    layer: str = ""
    """Layer of the parameter, or the numbers of the parameters in the same block."""
    kind: tuple[str, Shape] = ("", ())
    """Key for comparisons: equal for the same parameter of similar layers, "" if unknown."""

    size: int = 0
    nonfinite: int = 0
    """Number of NaN and Inf in all moments."""
    negative: int = 0
    """Number of second moments below 0, which no average of squares can be."""
    zeros: int = 0
    """Number of second moments that are exactly 0."""
    mean: float = math.nan
    """Mean of the finite second moments."""

    def measure(self, step: float | None) -> None:
        """Reads the moments. `step` is the default for a missing value."""
        self.step = step if self.step is None else self.step
        second = self.second.read()
        if np.iscomplexobj(second):
            # For a complex parameter, torch averages squares of real and imaginary parts.
            second = second.view(np.real(second).dtype)
        finite = second[np.isfinite(second)]
        others = sum(int(np.count_nonzero(~np.isfinite(array.read()))) for array in self.others)
        self.size = len(second)
        self.nonfinite = len(second) - len(finite) + others
        self.negative = int(np.count_nonzero(finite < 0))
        self.zeros = int(np.count_nonzero(finite == 0))
        self.mean = float(finite.mean(dtype=np.float64)) if len(finite) else math.nan

    @property
    def dead(self) -> bool:
        """Whether every gradient so far was exactly 0."""
        return self.size > 0 and self.zeros == self.size

    @property
    def log_v_hat(self) -> float | None:
        """Log of the bias-corrected mean second moment, or None if the mean is not positive."""
        if not self.mean > 0 or not math.isfinite(self.mean):
            return None
        correction = 1.0
        if self.step is not None and self.step > 0 and 0 < self.beta2 < 1:
            correction = -math.expm1(self.step * math.log(self.beta2))
        return math.log(self.mean) - math.log(correction)


def find_moments(tree: Tree) -> list[Moments]:
    """Finds the moments of Adam-like optimizers: torch, then optax, in saved order."""
    return [*_torch_moments(tree), *_optax_moments(tree)]


def _torch_moments(tree: Tree) -> Iterator[Moments]:
    for path, array in tree.arrays.items():
        # bitsandbytes names the moments state1 and state2; its 8-bit states are integers.
        if path[-1] == "exp_avg_sq":
            names = ("exp_avg", "max_exp_avg_sq")
        elif path[-1] == "state2" and "float" in array.dtype:
            names = ("state1",)
        else:
            continue
        state = path[:-1]
        last = len(state) - 1
        at = max((at for at, key in enumerate(state[:-1]) if key == "state"), default=last)
        optimizer, key = state[:at], dotted(state[at + 1 :] or state[at:])
        group = tree.groups.get(optimizer, {}).get(key, key)
        hyper = (*optimizer, "param_groups", *group.split("."))
        others = (tree.arrays.get((*state, name)) for name in names)
        step = tree.number((*state, "step"), (*hyper, "step"))
        beta2 = tree.number((*hyper, "betas", "1"))
        beta2 = _BETA2 if beta2 is None else beta2
        yield Moments(optimizer, key, array, tuple(filter(None, others)), step, beta2)


def _optax_moments(tree: Tree) -> Iterator[Moments]:
    for path, array in tree.arrays.items():
        for at in (at for at, name in enumerate(path) if name == "nu"):
            optimizer, parameter = path[:at], path[at + 1 :]
            first = tree.arrays.get((*optimizer, "mu", *parameter))
            if first is not None and first.shape == array.shape:
                largest = tree.arrays.get((*optimizer, "nu_max", *parameter))
                others = tuple(filter(None, (first, largest)))
                step = tree.number((*optimizer, "count"))
                yield Moments(optimizer, dotted(parameter), array, others, step, _BETA2)
                break
