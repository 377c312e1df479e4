"""The types of value in a policy file, each with its rule as text for error messages.

Numbers are float32 in the core, so a range has to hold for the float32 too: 0.99999999 is in (0, 1)
and its float32 is 1.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

NONE = "none"
"""An absent limit in TOML, which has no null."""

_SMALLEST = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)


def broken(rule: str, **more: Any) -> PydanticCustomError:
    """The error of a value that breaks `rule`; `problems` turns it into a `Problem`.

    `more` may have `choices` (allowed values) and `entry` (index of the wrong entry of a list).
    """
    return PydanticCustomError("rule", "must be {rule}", {"rule": rule, **more})


def to_float32(value: float) -> float:
    """The nearest float32, as a Python float."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


class _Checked:
    """A pydantic annotation whose `check` is the whole validation."""

    def check(self, value: Any) -> Any:
        raise NotImplementedError

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        del source, handler
        return core_schema.no_info_plain_validator_function(self.check)


@dataclass(frozen=True, kw_only=True)
class Number(_Checked):
    """A finite float within bounds; a whole number is fine, a bool or a string is not."""

    above: float | None = None
    below: float | None = None
    least: float | None = None
    most: float | None = None
    none: bool = False
    """Whether "none" is allowed: no such limit."""

    @property
    def rule(self) -> str:
        """The rule as text."""
        return "a finite number" + _bounds(self) + (f', or "{NONE}"' if self.none else "")

    def check(self, value: Any) -> float | None:
        """Returns the value as a float, unrounded."""
        if self.none and (value is None or value == NONE):
            return None
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise broken(self.rule)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or not _inside(self, number):
            raise broken(self.rule)
        single = to_float32(number)
        if abs(number) > _LARGEST or 0 < abs(number) < _SMALLEST:
            raise broken(
                f"{self.rule}, that a float32 can hold ({_SMALLEST:.3g} to {_LARGEST:.3g})"
            )
        if not _inside(self, single):
            raise broken(f"{self.rule}, as a float32 too, where this one becomes {single}")
        return number


@dataclass(frozen=True, kw_only=True)
class Whole(_Checked):
    """A whole number within bounds; 25.0 is not one."""

    least: int = 0
    most: int = 10_000_000  # below 2**24: exact as a float32, and twice it is far from int32's end

    @property
    def rule(self) -> str:
        """The rule as text."""
        if self.least == self.most:
            return str(self.least)
        return f"a whole number from {self.least} to {self.most}"

    def check(self, value: Any) -> int:
        """Returns the value as an int."""
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise broken(self.rule)
        number = int(value)
        if not self.least <= number <= self.most:
            raise broken(self.rule)
        return number


@dataclass(frozen=True)
class OneOf(_Checked):
    """One of a few strings."""

    choices: tuple[str, ...]

    @property
    def rule(self) -> str:
        """The rule as text."""
        return "one of " + ", ".join(f'"{each}"' for each in self.choices)

    def check(self, value: Any) -> str:
        """Returns the string."""
        if not isinstance(value, str) or value not in self.choices:
            raise broken(self.rule, choices=self.choices)
        return value

    @classmethod
    def of(cls, literal: Any) -> OneOf:
        """The strings of a `Literal[...]`, so that types and validation stay equal."""
        return cls(get_args(literal))


@dataclass(frozen=True, kw_only=True)
class Text(_Checked):
    """A string."""

    empty: bool = True

    @property
    def rule(self) -> str:
        """The rule as text."""
        return "a string" if self.empty else "a string that is not empty, on one line"

    def check(self, value: Any) -> str:
        """Returns the string."""
        if not isinstance(value, str):
            raise broken(self.rule)
        if not self.empty and (not value.strip() or len(value.splitlines()) != 1):
            raise broken(self.rule)
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise broken(f"{self.rule}, that UTF-8 can hold") from error
        return value


@dataclass(frozen=True)
class Flag(_Checked):
    """true or false."""

    rule = "true or false"

    def check(self, value: Any) -> bool:
        """Returns the bool."""
        if not isinstance(value, bool):
            raise broken(self.rule)
        return value


@dataclass(frozen=True)
class Listed(_Checked):
    """A list of strings of one kind, none of them twice."""

    kind: OneOf | Text
    empty: bool = False

    @property
    def rule(self) -> str:
        """The rule as text."""
        what = "a list" if self.empty else "a list that is not empty"
        return f"{what}, of: {self.kind.rule}"

    def check(self, value: Any) -> tuple[str, ...]:
        """Returns the entries."""
        if not isinstance(value, list | tuple) or not (value or self.empty):
            raise broken(self.rule)
        for i, entry in enumerate(value):
            try:
                self.kind.check(entry)
            except PydanticCustomError as error:
                raise broken(**{**(error.context or {}), "entry": i}) from error
            if entry in value[:i]:
                raise broken("in the list once; it is there already", entry=i, choices=value[:i])
        return tuple(value)


def _inside(bounds: Number, value: float) -> bool:
    return (
        (bounds.above is None or value > bounds.above)
        and (bounds.below is None or value < bounds.below)
        and (bounds.least is None or value >= bounds.least)
        and (bounds.most is None or value <= bounds.most)
    )


def _bounds(bounds: Number) -> str:
    limits = [
        f"{name} {value:g}"
        for name, value in (
            ("above", bounds.above),
            ("of at least", bounds.least),
            ("below", bounds.below),
            ("of at most", bounds.most),
        )
        if value is not None
    ]
    return f" {' and '.join(limits)}" if limits else ""


Positive = Annotated[float, Number(above=0)]
NotNegative = Annotated[float, Number(least=0)]
Fraction = Annotated[float, Number(above=0, below=1)]
"""Strictly between 0 and 1: decays, factors."""
Ratio = Annotated[float, Number(least=1)]
Limit = Annotated[float | None, Number(above=0, none=True)]
"""An absolute limit, or none."""
Steps = Annotated[int, Whole(least=1)]
StepsOrZero = Annotated[int, Whole(least=0)]
Name = Annotated[str, Text(empty=False)]
Words = Annotated[str, Text()]
OnOff = Annotated[bool, Flag()]

Target = Annotated[
    Literal["reciprocal", "mean", "max"], OneOf.of(Literal["reciprocal", "mean", "max"])
]
Mode = Annotated[Literal["heal", "observe"], OneOf.of(Literal["heal", "observe"])]
