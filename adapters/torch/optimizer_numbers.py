"""`OptimizerNumbers`: which numbers the program gives to an optimizer, and which of them are held.

A number is an entry of a parameter group, such as a weight decay, or an element of an entry, such
as the second of two betas. The learning rate is not among these numbers: healcore has a multiplier
and a limit for the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from healcore.runtime.driver import NumberRange
from healcore.torch.gradients import ParamGroup

_IndexedNumber = tuple[int | None, float]
"""A number of an entry, after its index in the tuple or list (None if the entry is neither)."""

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


class _NumberKey(NamedTuple):
    """The place of a number in `param_groups`."""

    group: int
    entry: str
    element: int | None
    """Index within a tuple or list, or None if the entry itself is the number."""


class _GroupReader:
    """Reads the entries of one parameter group, and finds the entries that have changed."""

    def __init__(self, group: ParamGroup) -> None:
        self._entries = _entries(group)
        self._size = len(group)  # a larger group has an added entry
        self._get: Callable[[ParamGroup], tuple[Any, ...]]
        """Returns the values of all entries."""
        if len(self._entries) > 1:
            # Reads all entries at once, which is twice as fast. It needs at least two names.
            self._get = itemgetter(*self._entries)
        else:
            self._get = self._get_few
        self._values: tuple[Any, ...] = (_UNREAD,) * len(self._entries)
        """The values of all entries at the last read."""
        self._numbers: dict[str, list[_IndexedNumber]] = {}
        """Entry -> its numbers at the last read."""
        self._mutable: set[str] = set()
        """Entries whose numbers can change although the entry is the same object."""

    def fits(self, group: ParamGroup) -> bool:
        """Whether the group still has the entries that this object reads."""
        return len(group) == self._size and all(entry in group for entry in self._entries)

    def is_unchanged(self, group: ParamGroup) -> bool:
        """Whether certainly no number has changed since `read`. Fast: False may be wrong.

        Compares objects, not values: `==` of two tensors could wait for a device.
        """
        if self._mutable or len(group) != self._size:
            return False
        try:
            return all(map(is_, self._get(group), self._values))
        except KeyError:
            return False

    def read(self, group: ParamGroup) -> dict[str, list[_IndexedNumber]]:
        """Reads a group that `fits`. Returns the numbers of the entries that may have changed."""
        values = self._get(group)
        changed: dict[str, list[_IndexedNumber]] = {}
        for entry, old, new in zip(self._entries, self._values, values, strict=True):
            if new is old and entry not in self._mutable:
                continue
            numbers = _numbers(new)
            self._numbers[entry] = numbers
            changed[entry] = numbers
            if _is_mutable(new):
                self._mutable.add(entry)
            else:
                self._mutable.discard(entry)
        self._values = values
        return changed

    def changed_entries(self, group: ParamGroup) -> list[str]:
        """The entries of which a number has changed since `read`. NaN equals NaN."""
        changed: list[str] = []
        for entry, old in zip(self._entries, self._values, strict=True):
            new = group.get(entry)
            if new is old and entry not in self._mutable:
                continue
            # Compared as text, because NaN is not equal to itself.
            if repr(_numbers(new)) != repr(self._numbers[entry]):
                changed.append(entry)
        return changed

    def _get_few(self, group: ParamGroup) -> tuple[Any, ...]:
        """The values of all entries, for a group with at most one entry."""
        return tuple(map(group.get, self._entries))


_UNREAD = object()


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
        self._readers: list[_GroupReader] = []
        self._ranges: dict[_NumberKey, NumberRange] = {}
        self._held: dict[_NumberKey, NumberRange] = {}
        self._changed_by_step: set[tuple[int, str]] = set()
        """Group and entry of what `optimizer.step()` itself has changed."""

    def ranges(self) -> dict[str, NumberRange]:
        """The values that the program gave to the optimizer at the steps since `hold`.

        Returns:
            Name -> range, for example `.weight_decay` for the first group, or `[1].betas[0]` for
            the second. Values that were replaced because they are held are not included.
        """
        return {self._name(key): number_range for key, number_range in self._ranges.items()}

    def hold(self, ranges: Mapping[str, NumberRange]) -> None:
        """Holds the numbers in `ranges` from now on, and releases all other numbers.

        The ranges of `ranges()` begin again.

        Args:
            ranges: names as in `ranges()` -> range. Names that no parameter group has now are
                ignored.
        """
        self._held = {}
        for i, group in enumerate(self._optimizer.param_groups):
            for entry in _entries(group):
                for element, _ in _numbers(group[entry]):
                    key = _NumberKey(i, entry, element)
                    name = self._name(key)
                    if name in ranges:
                        self._held[key] = ranges[name]
        self._readers.clear()
        self._ranges.clear()

    def read(self) -> None:
        """Reads the program's values at a judged step, before any of them is replaced.

        A step at which no value was replaced by another object costs only a comparison.
        """
        groups = self._optimizer.param_groups
        if len(groups) != len(self._readers):
            self._readers = [_GroupReader(group) for group in groups]
        for i, group in enumerate(groups):
            if self._readers[i].is_unchanged(group):
                continue
            if not self._readers[i].fits(group):
                self._readers[i] = _GroupReader(group)
            for entry, numbers in self._readers[i].read(group).items():
                if (i, entry) not in self._changed_by_step:
                    self._extend_ranges(i, entry, numbers)

    def replacements(self) -> Iterable[tuple[ParamGroup, str, Any]]:
        """What this step uses instead of the numbers that are outside of their ranges.

        Returns:
            Parameter group, name of the entry, and the entry's value for this step. Nothing is
            written: the caller replaces the entries, and restores them after the step.
        """
        if not self._held:
            return ()
        groups = self._optimizer.param_groups
        replaced: dict[tuple[int, str], Any] = {}
        for key, held in self._held.items():
            place = (key.group, key.entry)
            if key.group >= len(groups) or place in self._changed_by_step:
                continue
            own = groups[key.group].get(key.entry)
            for element, number in _numbers(own):
                # Written so that NaN is outside of every range.
                is_inside = held.low <= number <= held.high
                if element == key.element and not is_inside:
                    before = replaced.get(place, own)  # another element may be replaced already
                    replaced[place] = _with_number(before, element, held.last)
        return [(groups[i], entry, value) for (i, entry), value in replaced.items()]

    def find_changes_by_step(self) -> None:
        """Excludes entries that `optimizer.step()` has changed. Call it after the step.

        Such an entry is a state of the optimizer and not a setting of the program, so it must not
        be held. The program's own values have to be back in the groups. An excluded entry stays
        excluded.
        """
        groups_and_readers = zip(self._optimizer.param_groups, self._readers, strict=False)
        for i, (group, reader) in enumerate(groups_and_readers):
            if not reader.is_unchanged(group):
                for entry in reader.changed_entries(group):
                    self._exclude(i, entry)

    def _exclude(self, group: int, entry: str) -> None:
        self._changed_by_step.add((group, entry))
        for key in [*self._ranges]:
            if key.group == group and key.entry == entry:
                del self._ranges[key]

    def _extend_ranges(self, group: int, entry: str, numbers: Iterable[_IndexedNumber]) -> None:
        """Extends the ranges by the numbers of one entry."""
        for element, number in numbers:
            key = _NumberKey(group, entry, element)
            low = number
            high = number
            if math.isnan(number):
                # A NaN is outside of every range, as if it were below and above all numbers.
                low = -math.inf
                high = math.inf
            seen = self._ranges.get(key)
            if seen is not None:
                low = min(low, seen.low)
                high = max(high, seen.high)
            self._ranges[key] = NumberRange(low, high, number)

    def _name(self, key: _NumberKey) -> str:
        """The name of a number, see `ranges`."""
        name = f".{key.entry}"
        if key.element is not None:
            name += f"[{key.element}]"
        if not self._single or key.group != 0:
            name = f"[{key.group}]{name}"
        return name


def _entries(group: ParamGroup) -> list[str]:
    return [entry for entry in group if entry not in _NO_NUMBERS]


def _numbers(value: Any) -> list[_IndexedNumber]:
    """The numbers in an entry. Elements of a tuple or list that are not numbers are skipped."""
    if isinstance(value, tuple | list):
        return [(i, float(part)) for i, part in enumerate(value) if _is_number(part)]
    if _is_number(value):
        return [(None, float(value))]
    return []


def _is_number(value: Any) -> bool:
    """Whether a value is a real number that can be read without waiting for a device."""
    if type(value) is float:
        return True  # nearly always, and faster than the check below
    if isinstance(value, Tensor):
        is_real = not (value.is_complex() or value.dtype == torch.bool)
        return value.device.type == "cpu" and value.ndim == 0 and is_real
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_mutable(value: Any) -> bool:
    """Whether the numbers in an entry can change although the entry is the same object."""
    if isinstance(value, list):
        return bool(_numbers(value))
    if not isinstance(value, tuple):
        value = (value,)
    return any(isinstance(part, Tensor) and _is_number(part) for part in value)


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
