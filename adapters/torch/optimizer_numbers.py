"""`OptimizerNumbers`: which numbers the program gives to an optimizer, and which of them are held.

A number is an entry of a parameter group, such as a weight decay, or an element of an entry, such
as the second of two betas. The learning rate is not among these numbers: healcore has a multiplier
and a limit for the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from healcore.runtime.driver import NumberRange
from healcore.torch.gradients import ParamGroup

_NO_NUMBERS = {
    "params",
    "param_names",
    "lr",
    "initial_lr",
    "max_lr",
    "min_lr",
    "swa_lr",
    "base_momentum",
    "max_momentum",
}
"""Entries of a parameter group that are not read: parameters, the learning rate, and what torch's
schedulers keep there for themselves."""


_Key = tuple[int, str, int | None]
"""A parameter group, one of its entries, and the index of the number in the tuple or list, which
is None if the entry is itself a number."""


class OptimizerNumbers:
    """Reads the numbers of an optimizer at each judged step, and replaces numbers that are held.

    A program may set a number before `optimizer.step()` and reset it right afterwards, and a
    scheduler changes numbers between steps. So the numbers are read within the step.

    An entry that `optimizer.step()` itself or one of its hooks changes belongs to the optimizer,
    such as the step counter of a schedule-free optimizer, which must not be held. Such an entry is
    neither reported nor replaced.

    The calls within one step, in this order:

        read                    what the program gives the optimizer
        replacements            held numbers outside of their ranges
        optimizer's own step
        find_changes_by_step    what belongs to the optimizer

    Args:
        optimizer: the optimizer, without a wrapper.
        name: its name in the state, with which the names of its numbers begin.
    """

    def __init__(self, optimizer: Optimizer, name: str) -> None:
        self._optimizer = optimizer
        self._own_name = name
        self._single = len(optimizer.param_groups) == 1
        """Whether group 0 has no index in names. Names do not change if a group is added later."""
        self._given: dict[_Key, float] = {}
        """The numbers of the newest judged step."""
        self._are_new = False
        """Whether they differ from those of the step before, and the step has not ended."""
        self._ranges: dict[_Key, NumberRange] = {}
        self._held: Mapping[str, NumberRange] = {}
        """Name of a number -> the range in which it is held."""
        self._changed_by_step: set[_Key] = set()
        """What `optimizer.step()` itself has changed."""

    def ranges(self) -> dict[str, NumberRange]:
        """The values that the program gave to the optimizer at the steps since `hold`.

        Returns:
            Name -> range, for example "optimizer.weight_decay" for the first group, or
            `optimizer[1].betas[0]` for the second. Values that were replaced because they are held
            are not included.
        """
        found: dict[str, NumberRange] = {}
        for key, number_range in self._ranges.items():
            if key not in self._changed_by_step:
                found[self._name(key)] = number_range
        return found

    def hold(self, ranges: Mapping[str, NumberRange]) -> None:
        """Holds the numbers in `ranges` from now on, and releases all other numbers.

        The ranges of `ranges()` begin again.

        Args:
            ranges: names as in `ranges()` -> range. Names of other optimizers are ignored.
        """
        self._held = ranges
        self._ranges.clear()

    def read(self) -> None:
        """Reads the program's values at a judged step, before any of them is replaced."""
        given = self._numbers()
        self._are_new = given != self._given
        if self._ranges and not self._are_new:
            return  # in almost every step
        self._given = given
        for key, number in given.items():
            low, high = number, number
            if math.isnan(number):
                # Outside of every range, as if it were below and above all numbers.
                low, high = -math.inf, math.inf
            seen = self._ranges.get(key)
            if seen is not None:
                low, high = min(low, seen.low), max(high, seen.high)
            self._ranges[key] = NumberRange(low, high, number)

    def replacements(self) -> list[tuple[ParamGroup, str, Any]]:
        """What this step uses instead of the numbers that are outside of their ranges.

        Returns:
            Parameter group, name of the entry, and the entry's value for this step. Nothing is
            written: the caller replaces the entries, and restores them after the step.
        """
        values: dict[tuple[int, str], Any] = {}
        if not self._held:
            return []
        for key, number in self._given.items():
            held = self._held.get(self._name(key))
            # Written so that NaN is outside of every range.
            if held is None or key in self._changed_by_step or held.low <= number <= held.high:
                continue
            group, entry, element = key
            value = values.get((group, entry), self._optimizer.param_groups[group][entry])
            values[group, entry] = _with_number(value, element, held.last)
        groups = self._optimizer.param_groups
        return [(groups[i], entry, value) for (i, entry), value in values.items()]

    def find_changes_by_step(self) -> None:
        """Excludes numbers that `optimizer.step()` has changed.

        Such a number is a state of the optimizer and not a setting of the program, so it must not
        be held. The program's own values have to be back in the groups. An excluded number stays
        excluded. Numbers that are the same as in the step before were changed by nobody.
        """
        if self._are_new:
            now = self._numbers()
        else:
            now = {}
        for key, number in now.items():
            before = self._given.get(key)
            # NaN is not equal to itself.
            if before != number and not (before != before and number != number):
                self._changed_by_step.add(key)
        self._are_new = False

    def _numbers(self) -> dict[_Key, float]:
        """The numbers in the groups that can be read without waiting for a device."""
        found: dict[_Key, float] = {}
        for i, group in enumerate(self._optimizer.param_groups):
            for entry, value in group.items():
                if entry in _NO_NUMBERS:
                    continue
                parts: Iterable[tuple[int | None, Any]] = [(None, value)]
                if isinstance(value, tuple | list):
                    parts = enumerate(value)
                for element, part in parts:
                    if isinstance(part, Tensor):
                        is_real = not (part.is_complex() or part.dtype == torch.bool)
                        is_number = part.is_cpu and part.ndim == 0 and is_real
                    else:
                        is_number = isinstance(part, Real) and not isinstance(part, bool)
                    if is_number:
                        found[i, entry, element] = float(part)
        return found

    def _name(self, key: _Key) -> str:
        """The name of a number, see `ranges`."""
        group, entry, element = key
        name = self._own_name
        if not self._single or group != 0:
            name += f"[{group}]"
        name += f".{entry}"
        if element is not None:
            name += f"[{element}]"
        return name


def _with_number(value: Any, element: int | None, number: float) -> Any:
    """An entry with a number replaced. The new number has the type of the old one.

    An int stays an int where possible, because an optimizer may count with it (L-BFGS).
    """
    if element is not None:
        parts = [*value]
        parts[element] = _with_number(parts[element], None, number)
        if isinstance(value, list):
            return parts
        return tuple(parts)
    if isinstance(value, Tensor):
        return torch.full_like(value, number)
    if isinstance(value, Integral) and number.is_integer():
        return int(number)
    return number
