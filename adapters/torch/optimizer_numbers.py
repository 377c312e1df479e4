"""The numbers of an optimizer besides learning rates: weight decay, betas, momentum, eps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.optim import Optimizer

NO_HYPERPARAMETERS = {
    *("params", "param_names", "initial_lr"),
    *("foreach", "fused", "capturable", "differentiable"),
}
"""Entries of a parameter group that do not affect training."""


class NumberEntry(NamedTuple):
    """An entry of a parameter group that is a number, or a tuple of numbers."""

    group: dict[str, Any]
    key: str
    numbers: dict[str, float]
    """Name -> number."""

    def with_numbers(self, numbers: list[float]) -> Any:
        """The entry with other numbers."""
        value = self.group[self.key]
        if isinstance(value, tuple | list):
            return tuple(numbers) if isinstance(value, tuple) else numbers
        return numbers[0]


def entries(name: str, optimizer: Optimizer) -> Iterator[NumberEntry]:
    """The entries of an optimizer; `name` is its name in the state."""
    for g, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key in NO_HYPERPARAMETERS or "lr" in key:
                continue
            path, several = f"{name}.param_groups[{g}].{key}", isinstance(value, tuple | list)
            parts = {f"{path}[{i}]": v for i, v in enumerate(value)} if several else {path: value}
            if all(type(each) in (int, float) and math.isfinite(each) for each in parts.values()):
                yield NumberEntry(group, key, parts)


def numbers(name: str, optimizer: Optimizer) -> dict[str, float]:
    """All numbers of an optimizer by name."""
    return {n: v for entry in entries(name, optimizer) for n, v in entry.numbers.items()}
