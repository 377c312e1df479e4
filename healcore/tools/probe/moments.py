"""Adam's moments in a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from healcore.checkpoint_contents import Array, Contents

Keys = tuple[str, ...]
Shape = tuple[int, ...]

_WRAPPERS = ("value", "raw_value")
"""Keys under which flax.nnx stores an array."""
_BETA2 = 0.999
"""Adam's beta2 if the state does not contain it, as the states of optax."""


class Tree:
    """The contents of a checkpoint by path, and the weights in files next to an optimizer's."""

    def __init__(self, contents: Contents, weights: Sequence[Contents] = ()) -> None:
        self.values: Mapping[Keys, Any] = contents.leaves
        self.arrays: dict[Keys, Array] = {}
        for path, array in contents.arrays.items():
            is_wrapped = len(path) > 1 and path[-1] in _WRAPPERS
            self.arrays[path[:-1] if is_wrapped else path] = array
        for each in weights:
            self.arrays |= {("weights", *path): array for path, array in each.arrays.items()}
        self.groups: dict[Keys, dict[str, str]] = {}
        """Index of the parameter group by optimizer and parameter, in the optimizer's order."""
        for path, value in self.values.items():
            if path[-4:-3] == ("param_groups",) and path[-2] == "params":
                self.groups.setdefault(path[:-4], {})[str(value)] = path[-3]

    def number(self, *paths: Keys) -> float | None:
        """Returns the first value saved as a number or as an array of one element, or None."""
        for path in paths:
            value = self.values.get(path)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return float(value) if abs(value) < 1e300 else math.inf
            array = self.arrays.get(path)
            if array is not None and array.size == 1:
                return float(array.read()[0])
        return None


@dataclass
class Moments:
    """Adam's moments of one parameter."""

    optimizer: Keys
    key: str
    """Dotted path of the parameter, or its number."""
    second: Array
    others: tuple[Array | None, ...]
    """The other moments, which must also be finite."""
    step: float | None
    """Number of updates, or None if the state lacks the value."""
    beta2: float = _BETA2

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
    dead: bool = False
    """Whether every gradient so far was exactly 0."""
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
        others = [array.read() for array in self.others if array is not None]
        self.size = len(second)
        self.nonfinite = len(second) - len(finite)
        self.nonfinite += sum(int(np.count_nonzero(~np.isfinite(each))) for each in others)
        self.negative = int(np.count_nonzero(finite < 0))
        self.dead = len(second) > 0 and not second.any()
        self.mean = float(finite.mean(dtype=np.float64)) if len(finite) else math.nan

    @property
    def log_v_hat(self) -> float | None:
        """Log of the bias-corrected mean second moment, or None if the mean is not positive."""
        if not 0 < self.mean < math.inf:
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
        optimizer, key = state[:at], ".".join(state[at + 1 :] or state[at:])
        group = tree.groups.get(optimizer, {}).get(key, key)
        hyper = (*optimizer, "param_groups", *group.split("."))
        others = tuple(tree.arrays.get((*state, name)) for name in names)
        step = tree.number((*state, "step"), (*hyper, "step"))
        beta2 = tree.number((*hyper, "betas", "1"))
        yield Moments(optimizer, key, array, others, step, _BETA2 if beta2 is None else beta2)


def _optax_moments(tree: Tree) -> Iterator[Moments]:
    for path, array in tree.arrays.items():
        for at in (at for at, name in enumerate(path) if name == "nu"):
            optimizer, parameter = path[:at], path[at + 1 :]
            first = tree.arrays.get((*optimizer, "mu", *parameter))
            if first is not None and first.shape == array.shape:
                others = (first, tree.arrays.get((*optimizer, "nu_max", *parameter)))
                step = tree.number((*optimizer, "count"))
                yield Moments(optimizer, ".".join(parameter), array, others, step)
                break
