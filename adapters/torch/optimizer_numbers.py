"""`OptimizerNumbers`: which numbers the program gives to an optimizer, and which of them are held.

A number is an entry of a parameter group, such as a weight decay, or an element of an entry, such
as the second of two betas. The learning rate is not among these numbers: healcore has a multiplier
and a limit for the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from healcore.runtime.driver import NumberRange

_NO_NUMBERS = {
    *("params", "param_names"),
    *("lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"),
}
"""Entries of a parameter group that are not read: parameters, the learning rate, and what torch's
schedulers keep there for themselves."""


class _NumberKey(NamedTuple):
    """The place of a number in `param_groups`."""

    group: int
    entry: str
    element: int | None
    """Index within a tuple or list, or None if the entry itself is the number."""


class _GroupValues(NamedTuple):
    """The entries of one parameter group at the last read."""

    entries: list[str]
    values: list[Any]
    size: int
    """Number of entries of the whole group, to notice an added entry."""
    immutable: bool
    """Whether a number can only change by being replaced by another object."""


class OptimizerNumbers:
    """Reads the numbers of an optimizer at each judged step, and replaces numbers that are held.

    A program may set a number before `optimizer.step()` and reset it right afterwards, and a
    scheduler changes numbers between steps. So the numbers are read within the step.

    An entry that `optimizer.step()` itself or one of its hooks changes belongs to the optimizer: the
    step counter of a schedule-free optimizer, which must not be held. Such an entry is neither
    reported nor replaced.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._single = len(optimizer.param_groups) == 1
        """Whether group 0 has no index in names. Names do not change if a group is added later."""
        self._groups: list[_GroupValues] = []
        self._ranges: dict[_NumberKey, NumberRange] = {}
        self._held: dict[_NumberKey, NumberRange] = {}
        self._changed_by_step: set[tuple[int, str]] = set()
        """Group and entry of what `optimizer.step()` itself has changed."""

    def ranges(self) -> dict[str, NumberRange]:
        """The values at the steps since `hold`: `.weight_decay` or `[1].betas[0]` -> range."""
        return {self._name(key): each for key, each in self._ranges.items()}

    def hold(self, ranges: Mapping[str, NumberRange]) -> None:
        """Holds the numbers in `ranges` from now on, releases all others, and restarts `ranges()`.

        Names that no parameter group has now are ignored.
        """
        groups = self._optimizer.param_groups
        keys = [
            _NumberKey(i, entry, element)
            for i, group in enumerate(groups)
            for entry in _entries(group)
            for element, _ in _numbers(group[entry])
        ]
        self._held = {key: ranges[self._name(key)] for key in keys if self._name(key) in ranges}
        self._groups.clear()
        self._ranges.clear()

    def read(self) -> None:
        """Reads the program's values at a judged step, before any of them is replaced.

        A step at which no value was replaced by another object costs only a comparison.
        """
        groups = self._optimizer.param_groups
        if len(groups) != len(self._groups):
            self._groups = [_GroupValues([], [], -1, False) for _ in groups]
        for i, group in enumerate(groups):
            known = self._groups[i]
            values = map(group.get, known.entries)
            if known.immutable and len(group) == known.size and all(map(is_, values, known.values)):
                continue
            self._groups[i] = _values_of(group)
            self._extend_ranges(i)

    def replacements(self) -> list[tuple[dict[str, Any], str, Any]]:
        """What this step uses instead: group, entry and value of each entry with a held number.

        Only numbers that the program has set outside of the range in which they are held.
        """
        groups = self._optimizer.param_groups
        replaced: dict[tuple[int, str], Any] = {}
        for key, held in self._held.items():
            place = key.group, key.entry
            if key.group >= len(groups) or place in self._changed_by_step:
                continue
            own = groups[key.group].get(key.entry)
            for element, number in _numbers(own):
                if element == key.element and not held.low <= number <= held.high:
                    before = replaced.get(place, own)
                    replaced[place] = _with_number(before, element, held.last)
        return [(groups[i], entry, value) for (i, entry), value in replaced.items()]

    def find_changes_by_step(self) -> None:
        """Excludes entries that `optimizer.step()` has changed. Call it after the step.

        The program's own values have to be back in the groups.
        """
        groups = self._optimizer.param_groups
        for i, (group, known) in enumerate(zip(groups, self._groups, strict=False)):
            values = [*map(group.get, known.entries)]
            if known.immutable and all(map(is_, values, known.values)):
                continue
            for entry, before, after in zip(known.entries, known.values, values, strict=True):
                if before is not after and not _same_numbers(before, after):
                    self._exclude(i, entry)

    def _exclude(self, group: int, entry: str) -> None:
        self._changed_by_step.add((group, entry))
        for key in [key for key in self._ranges if (key.group, key.entry) == (group, entry)]:
            del self._ranges[key]

    def _extend_ranges(self, group: int) -> None:
        """Extends the ranges by the values of one group."""
        known = self._groups[group]
        for entry, value in zip(known.entries, known.values, strict=True):
            if (group, entry) in self._changed_by_step:
                continue
            for element, number in _numbers(value):
                key = _NumberKey(group, entry, element)
                # A NaN is outside of every range, as if it were below and above all numbers.
                low, high = (-math.inf, math.inf) if math.isnan(number) else (number, number)
                seen = self._ranges.get(key)
                if seen is not None:
                    low, high = min(low, seen.low), max(high, seen.high)
                self._ranges[key] = NumberRange(low, high, number)

    def _name(self, key: _NumberKey) -> str:
        group = "" if self._single and key.group == 0 else f"[{key.group}]"
        element = "" if key.element is None else f"[{key.element}]"
        return f"{group}.{key.entry}{element}"


def _values_of(group: Mapping[str, Any]) -> _GroupValues:
    entries = _entries(group)
    values = [group[entry] for entry in entries]
    return _GroupValues(entries, values, len(group), all(map(_is_immutable, values)))


def _entries(group: Mapping[str, Any]) -> list[str]:
    return [entry for entry in group if entry not in _NO_NUMBERS]


def _numbers(value: Any) -> list[tuple[int | None, float]]:
    """The numbers in an entry, each with its index in the tuple or list (None if it is neither)."""
    if isinstance(value, tuple | list):
        return [(i, float(each)) for i, each in enumerate(value) if _is_number(each)]
    return [(None, float(value))] if _is_number(value) else []


def _is_number(value: Any) -> bool:
    """Whether a value is a real number that can be read without waiting for a device."""
    if isinstance(value, Tensor):
        is_real = not (value.is_complex() or value.dtype == torch.bool)
        return value.device.type == "cpu" and value.ndim == 0 and is_real
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_immutable(value: Any) -> bool:
    """Whether the numbers in an entry can change only if the entry is replaced."""
    if isinstance(value, list):
        return not _numbers(value)
    parts = value if isinstance(value, tuple) else (value,)
    return not any(isinstance(each, Tensor) and _is_number(each) for each in parts)


def _same_numbers(one: Any, other: Any) -> bool:
    """Whether two entries have equal numbers. A NaN equals a NaN."""
    return repr(_numbers(one)) == repr(_numbers(other))


def _with_number(value: Any, element: int | None, number: float) -> Any:
    """An entry with a number replaced. The new number has the type of the old one.

    An int stays an int where possible, because an optimizer may count with it (L-BFGS).
    """
    if element is not None:
        parts = [*value]
        parts[element] = _with_number(parts[element], None, number)
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, Tensor):
        return torch.full_like(value, number)
    if isinstance(value, Integral) and number.is_integer():
        return int(number)
    return number
