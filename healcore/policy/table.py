"""The tables of a policy file (`Table`), and the types of their values with their rules.

Numbers are float32 in the core, so a range has to hold for the float32 too: 0.99999999 is in (0, 1)
and its float32 is 1.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

NONE = "none"
"""An absent limit in TOML, which has no null."""

_SMALLEST = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)


def broken(rule: str, **more: Any) -> PydanticCustomError:
    """The error of a value that breaks `rule`; `errors.problems_in` turns it into a `Problem`.

    `more` may have `choices` (allowed values) and `entry` (index of the wrong entry of a list).
    """
    return PydanticCustomError("rule", "must be {rule}", {"rule": rule, **more})


def to_float32(value: float) -> float:
    """The nearest float32, as a Python float."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


@dataclass(frozen=True)
class Value:
    """A pydantic annotation: `check` is the whole validation, and returns the value."""

    rule: str
    """What a value has to be, as text for messages and docs/policies.md."""
    check: Callable[[Any], Any]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        del source, handler
        return core_schema.no_info_plain_validator_function(self.check)


def number(
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
    none: bool = False,
) -> Value:
    """A finite float within bounds; a whole number is fine, a bool or a string is not.

    With `none` the string "none" means no such limit.
    """
    bounds = {"above": above, "of at least": least, "below": below, "of at most": most}
    limits = [f"{name} {bound:g}" for name, bound in bounds.items() if math.isfinite(bound)]
    rule = " ".join(["a finite number", " and ".join(limits)]).strip()
    rule += f', or "{NONE}"' if none else ""

    def inside(value: float) -> bool:
        return above < value < below and least <= value <= most

    def check(value: Any) -> float | None:
        if none and (value is None or value == NONE):
            return None
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise broken(rule)
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        if not math.isfinite(found) or not inside(found):
            raise broken(rule)
        if abs(found) > _LARGEST or 0 < abs(found) < _SMALLEST:
            raise broken(f"{rule}, that a float32 can hold ({_SMALLEST:.3g} to {_LARGEST:.3g})")
        if not inside(to_float32(found)):
            raise broken(f"{rule}, as a float32 too, where this one becomes {to_float32(found)}")
        return found

    return Value(rule, check)


def whole(*, least: int = 0, most: int = 10_000_000) -> Value:
    """A whole number within bounds; 25.0 is not one.

    The largest is below 2**24: exact as a float32, and twice it is far from int32's end.
    """
    rule = str(least) if least == most else f"a whole number from {least} to {most}"

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise broken(rule)
        if not least <= int(value) <= most:
            raise broken(rule)
        return int(value)

    return Value(rule, check)


def one_of(*choices: str) -> Value:
    """One of a few strings."""
    rule = "one of " + ", ".join(f'"{each}"' for each in choices)

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise broken(rule, choices=choices)
        return value

    return Value(rule, check)


def text(*, empty: bool = True) -> Value:
    """A string."""
    rule = "a string" if empty else "a string that is not empty, on one line"

    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise broken(rule)
        if not empty and (not value.strip() or len(value.splitlines()) != 1):
            raise broken(rule)
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise broken(f"{rule}, that UTF-8 can hold") from error
        return value

    return Value(rule, check)


def listed(kind: Value, *, empty: bool = False) -> Value:
    """A list of different strings of one kind."""
    rule = f"{'a list' if empty else 'a list that is not empty'}, of: {kind.rule}"

    def check(value: Any) -> tuple[str, ...]:
        if not isinstance(value, list | tuple) or not (value or empty):
            raise broken(rule)
        for i, entry in enumerate(value):
            try:
                kind.check(entry)
            except PydanticCustomError as error:
                raise broken(**{**(error.context or {}), "entry": i}) from error
            if entry in value[:i]:
                raise broken("in the list once; it is there already", entry=i, choices=value[:i])
        return tuple(value)

    return Value(rule, check)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise broken("true or false")
    return value


Positive = Annotated[float, number(above=0)]
NotNegative = Annotated[float, number(least=0)]
Fraction = Annotated[float, number(above=0, below=1)]
"""Strictly between 0 and 1: decays, factors."""
Ratio = Annotated[float, number(least=1)]
Limit = Annotated[float | None, number(above=0, none=True)]
"""An absolute limit, or none."""
Steps = Annotated[int, whole(least=1)]
StepsOrZero = Annotated[int, whole()]
OnOff = Annotated[bool, Value("true or false", _flag)]

_Target = Literal["reciprocal", "mean", "max"]
_Mode = Literal["heal", "observe"]
Target = Annotated[_Target, one_of(*get_args(_Target))]
Mode = Annotated[_Mode, one_of(*get_args(_Mode))]


class Conflict(NamedTuple):
    """Two values of one table that exclude each other."""

    path: tuple[str | int, ...]
    """Path from the table to the value that the message names."""
    value: Any
    rule: str
    write: str


class AtMost(NamedTuple):
    """A rule of a table: the value of `key` is at most the value of `limit` (may be dotted)."""

    key: str
    limit: str
    more: str
    """What `limit` would have to be instead: "longer", "larger"."""
    why: str = ""

    def conflict(self, table: Table) -> Conflict | None:
        """The conflict if a table breaks the rule, else None."""
        value, most = getattr(table, self.key), attrgetter(self.limit)(table)
        if value <= most:
            return None
        rule = f"at most {self.limit}, which is {most}" + (f": {self.why}" if self.why else "")
        write = f"{self.key} = {most}, or a {self.more} {self.limit}"
        return Conflict((self.key,), value, rule, write)


class OneNeeded(NamedTuple):
    """A rule of a table: `key` is not "none" where `other` is none or 0."""

    key: str
    other: str
    rule: str
    write: str

    def conflict(self, table: Table) -> Conflict | None:
        """The conflict if a table breaks the rule, else None."""
        if getattr(table, self.key) is not None or getattr(table, self.other):
            return None
        return Conflict((self.key,), NONE, self.rule, self.write)


class Table(BaseModel):
    """Base of all tables: frozen and strict.

    A subclass names the core's NamedTuple in `core` and has the same fields and defaults in any
    order (checked by tests/policy/test_schema.py), and in addition the fields in `host_only`.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    core: ClassVar[type | None] = None
    host_only: ClassVar[frozenset[str]] = frozenset()
    """Keys that only the host reads; the engine on the device does not have them."""
    rules: ClassVar[tuple[AtMost | OneNeeded, ...]] = ()

    def conflicts(self) -> Iterator[Conflict]:
        """Yields the conflicts between values; a subclass may add to `rules`."""
        yield from filter(None, (rule.conflict(self) for rule in self.rules))

    @model_validator(mode="after")
    def _check_conflicts(self) -> Any:
        found = list(self.conflicts())
        if found:
            raise PydanticCustomError("conflict", "values that conflict", {"conflicts": found})
        return self

    def config(self) -> Any:
        """The core's config. Floats are rounded to float32 once, for all backends."""
        assert self.core is not None, f"{type(self).__name__} has no counterpart in the core"
        fields = self.core._fields  # type: ignore[attr-defined]
        return self.core(**{name: _to_core(getattr(self, name)) for name in fields})


def _to_core(value: Any) -> Any:
    if isinstance(value, Table):
        return value.config()
    return to_float32(value) if isinstance(value, float) else value
