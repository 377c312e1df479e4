"""`OptimizerNumbers`: which numbers the program gives to an optimizer, and which of them are held.

A number is an entry of a parameter group, such as a weight decay, or an element of an entry, such
as the second of two betas. The learning rate is not among these numbers: healcore has a multiplier
and a limit for the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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


_Place = tuple[int, str]
"""A parameter group, and one of its entries."""
_Numbers = dict[int | None, float]
"""The numbers of an entry, by their index in the tuple or list (None if the entry is neither)."""


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
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._single = len(optimizer.param_groups) == 1
        """Whether group 0 has no index in names. Names do not change if a group is added later."""
        self._given: dict[_Place, tuple[Any, _Numbers]] = {}
        """The value of each entry at the last read, and the numbers in it."""
        self._ranges: dict[tuple[_Place, int | None], NumberRange] = {}
        """The range of each number."""
        self._held: Mapping[str, NumberRange] = {}
        """Name of a number -> the range in which it is held."""
        self._changed_by_step: set[_Place] = set()
        """What `optimizer.step()` itself has changed."""

    def ranges(self) -> dict[str, NumberRange]:
        """The values that the program gave to the optimizer at the steps since `hold`.

        Returns:
            Name -> range, for example `.weight_decay` for the first group, or `[1].betas[0]` for
            the second. Values that were replaced because they are held are not included.
        """
        found: dict[str, NumberRange] = {}
        for (place, element), number_range in self._ranges.items():
            if place not in self._changed_by_step:
                found[self._name(place, element)] = number_range
        return found

    def hold(self, ranges: Mapping[str, NumberRange]) -> None:
        """Holds the numbers in `ranges` from now on, and releases all other numbers.

        The ranges of `ranges()` begin again.

        Args:
            ranges: names as in `ranges()` -> range. Names that no parameter group has are ignored.
        """
        self._held = ranges
        self._given.clear()
        self._ranges.clear()

    def read(self) -> None:
        """Reads the program's values at a judged step, before any of them is replaced."""
        for place, value in self._changed():
            numbers = _numbers(value)
            self._given[place] = value, numbers
            for element, number in numbers.items():
                low, high = number, number
                if math.isnan(number):
                    # Outside of every range, as if it were below and above all numbers.
                    low, high = -math.inf, math.inf
                seen = self._ranges.get((place, element))
                if seen is not None:
                    low, high = min(low, seen.low), max(high, seen.high)
                self._ranges[place, element] = NumberRange(low, high, number)

    def replacements(self) -> list[tuple[ParamGroup, str, Any]]:
        """What this step uses instead of the numbers that are outside of their ranges.

        Returns:
            Parameter group, name of the entry, and the entry's value for this step. Nothing is
            written: the caller replaces the entries, and restores them after the step.
        """
        groups = self._optimizer.param_groups
        found: list[tuple[ParamGroup, str, Any]] = []
        for place, (value, numbers) in self._given.items():
            i, entry = place
            if not self._held or i >= len(groups) or place in self._changed_by_step:
                continue
            held_value = value
            for element, number in numbers.items():
                held = self._held.get(self._name(place, element))
                # Written so that NaN is outside of every range.
                if held is not None and not held.low <= number <= held.high:
                    held_value = _with_number(held_value, element, held.last)
            if held_value is not value:
                found.append((groups[i], entry, held_value))
        return found

    def find_changes_by_step(self) -> None:
        """Excludes entries that `optimizer.step()` has changed. Call it after the step.

        Such an entry is a state of the optimizer and not a setting of the program, so it must not
        be held. The program's own values have to be back in the groups. An excluded entry stays
        excluded.
        """
        for place, value in self._changed():
            _, before = self._given.get(place, (None, None))
            # Compared as text, because NaN is not equal to itself.
            if repr(_numbers(value)) != repr(before):
                self._changed_by_step.add(place)

    def _changed(self) -> list[tuple[_Place, Any]]:
        """Each entry whose numbers may have changed since `read`, with its value.

        Compares objects, not values: `==` of two tensors could wait for a device.
        """
        changed: list[tuple[_Place, Any]] = []
        for i, group in enumerate(self._optimizer.param_groups):
            for entry, value in group.items():
                if entry in _NO_NUMBERS:
                    continue
                given = self._given.get((i, entry))
                if given is None or given[0] is not value or _is_mutable(value):
                    changed.append(((i, entry), value))
        return changed

    def _name(self, place: _Place, element: int | None) -> str:
        """The name of a number, see `ranges`."""
        group, entry = place
        name = f".{entry}"
        if element is not None:
            name += f"[{element}]"
        if not self._single or group != 0:
            name = f"[{group}]{name}"
        return name


def _numbers(value: Any) -> _Numbers:
    """The numbers in an entry that can be read without waiting for a device."""
    parts: dict[int | None, Any] = {None: value}
    if isinstance(value, tuple | list):
        parts = dict(enumerate(value))
    found: _Numbers = {}
    for element, part in parts.items():
        is_number = isinstance(part, Real) and not isinstance(part, bool)
        if isinstance(part, Tensor):
            is_real = not (part.is_complex() or part.dtype == torch.bool)
            is_number = part.is_cpu and part.ndim == 0 and is_real
        if is_number:
            found[element] = float(part)
    return found


def _is_mutable(value: Any) -> bool:
    """Whether the numbers in an entry can change although the entry is the same object."""
    if isinstance(value, tuple):
        return any(isinstance(part, Tensor) for part in value)
    return isinstance(value, list | Tensor)


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
