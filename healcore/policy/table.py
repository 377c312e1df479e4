"""`Table`, the base of the tables in a policy file, and the types of their values.

The core uses float32, so ranges must also hold after rounding. For example, 0.99999999 is below 1,
but its float32 is 1.
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
"""Value of an absent limit in TOML, which has no null."""

_SMALLEST = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)


def broken(rule: str, **more: Any) -> PydanticCustomError:
    """Makes the error of a value that violates `rule`; `errors.problems_in` makes it a `Problem`.

    `more` may hold `choices` (allowed values) and `entry` (index of the wrong list entry).
    """
    return PydanticCustomError("rule", "must be {rule}", {"rule": rule, **more})


def to_float32(value: float) -> float:
    """Rounds to the nearest float32, as a Python float."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


@dataclass(frozen=True)
class Value:
    """A pydantic annotation whose `check` validates the value and returns it."""

    rule: str
    """The condition as text, for messages and docs/policies.md."""
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
    """A finite float within bounds; whole numbers are accepted, bools and strings are not.

    With `none`, the string "none" is accepted and means no limit.
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
            result = float(value)
        except OverflowError:
            result = math.inf
        if not math.isfinite(result) or not inside(result):
            raise broken(rule)
        if abs(result) > _LARGEST or 0 < abs(result) < _SMALLEST:
            raise broken(f"{rule}, in the range of float32 ({_SMALLEST:.3g} to {_LARGEST:.3g})")
        if not inside(to_float32(result)):
            raise broken(f"{rule}, also after rounding to float32, here {to_float32(result)}")
        return result

    return Value(rule, check)


def whole(*, least: int = 0, most: int = 10_000_000) -> Value:
    """An int within bounds; 25.0 is not accepted.

    The default upper bound is below 2**24, so values are exact as float32 and sums do not overflow
    int32.
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
    """One of the given strings."""
    rule = "one of " + ", ".join(f'"{each}"' for each in choices)

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise broken(rule, choices=choices)
        return value

    return Value(rule, check)


def text(*, empty: bool = True) -> Value:
    """A string."""
    rule = "a string" if empty else "a non-empty string on one line"

    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise broken(rule)
        if not empty and (not value.strip() or len(value.splitlines()) != 1):
            raise broken(rule)
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise broken(f"{rule}, that UTF-8 can encode") from error
        return value

    return Value(rule, check)


def listed(kind: Value, *, empty: bool = False) -> Value:
    """A list without duplicates; all entries are strings of one kind."""
    rule = f"{'a list' if empty else 'a non-empty list'}, each entry {kind.rule}"

    def check(value: Any) -> tuple[str, ...]:
        if not isinstance(value, list | tuple) or not (value or empty):
            raise broken(rule)
        for i, entry in enumerate(value):
            try:
                kind.check(entry)
            except PydanticCustomError as error:
                raise broken(**{**(error.context or {}), "entry": i}) from error
            if entry in value[:i]:
                raise broken("in the list once; this is a repetition", entry=i, choices=value[:i])
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
"""An absolute limit, or None for no limit."""
Steps = Annotated[int, whole(least=1)]
StepsOrZero = Annotated[int, whole()]
OnOff = Annotated[bool, Value("true or false", _flag)]

_Target = Literal["reciprocal", "mean", "max"]
_Mode = Literal["heal", "observe"]
Target = Annotated[_Target, one_of(*get_args(_Target))]
Mode = Annotated[_Mode, one_of(*get_args(_Mode))]


class Conflict(NamedTuple):
    """Values of one table that exclude each other."""

    path: tuple[str | int, ...]
    """Path from the table to the value that the message names."""
    value: Any
    rule: str
    write: str


class AtMost(NamedTuple):
    """Rule of a table: the value of `key` is at most the value of `limit` (a dotted key)."""

    key: str
    limit: str
    more: str
    """Adjective for a limit that would allow the value: "longer", "larger"."""
    why: str = ""

    def conflict(self, table: Table) -> Conflict | None:
        """Returns the conflict if the table violates the rule, else None."""
        value, most = getattr(table, self.key), attrgetter(self.limit)(table)
        if value <= most:
            return None
        rule = f"at most {self.limit}, which is {most}" + (f": {self.why}" if self.why else "")
        write = f"{self.key} = {most}, or a {self.more} {self.limit}"
        return Conflict((self.key,), value, rule, write)


class NumberUnless(NamedTuple):
    """Rule of a table: `key` must not be "none" if `other` is none or 0."""

    key: str
    other: str
    rule: str
    write: str

    def conflict(self, table: Table) -> Conflict | None:
        """Returns the conflict if the table violates the rule, else None."""
        if getattr(table, self.key) is not None or getattr(table, self.other):
            return None
        return Conflict((self.key,), NONE, self.rule, self.write)


class Table(BaseModel):
    """Base of all tables: frozen and strict.

    A subclass names the core's NamedTuple in `core` and has the same fields and defaults. Further
    fields are in `host_only`. tests/policy/test_schema.py checks this.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    core: ClassVar[type | None] = None
    host_only: ClassVar[frozenset[str]] = frozenset()
    """Keys that only the host reads; the engine's config lacks them."""
    rules: ClassVar[tuple[AtMost | NumberUnless, ...]] = ()

    def conflicts(self) -> Iterator[Conflict]:
        """Yields the violated `rules`; a subclass may yield further conflicts."""
        yield from filter(None, (rule.conflict(self) for rule in self.rules))

    @model_validator(mode="after")
    def _check_conflicts(self) -> Any:
        conflicts = list(self.conflicts())
        if conflicts:
            raise PydanticCustomError("conflict", "values that conflict", {"conflicts": conflicts})
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
