"""Declares which values a key of a policy may have, next to the key's default.

    class FixedConfig(NamedTuple):
        max_norm: Positive = 1.0

`healcore.policy` derives the check of a file, its error messages and the tables of docs/policies.md
from such declarations. The engine uses float32, so ranges also hold after rounding. For example,
0.99999999 is below 1, but its float32 is 1.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np

from healcore.core.array_namespace import FLOAT32_MAX

NONE = "none"
"""Value of an absent limit in TOML, which has no null."""

_SMALLEST = float(np.finfo(np.float32).tiny)


class RuleBroken(ValueError):
    """A value of a policy violates the rule of its key.

    Attributes:
        choices: allowed values, or empty if there is no list.
        entry: index of the wrong entry of a list, or None.
    """

    def __init__(self, rule: str, choices: tuple[str, ...] = (), entry: int | None = None) -> None:
        super().__init__(rule)
        self.rule, self.choices, self.entry = rule, choices, entry


class ValueRule(NamedTuple):
    """Rule for the value of a key: its check and its text, as metadata of `Annotated`.

    The check and its text stand side by side, so that the messages and the tables of
    docs/policies.md cannot differ from what is checked.
    """

    rule: str
    """The condition as text, for messages and docs/policies.md."""
    check: Callable[[Any], Any]
    """Returns the value of a valid input. Raises RuleBroken."""


def to_float32(value: float) -> float:
    """Rounds a number of a policy to what the engine computes with.

    Args:
        value: any number.

    Returns:
        The nearest float32 as a Python float; infinite for a number beyond float32.
    """
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def number(
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    below: float = math.inf,
    at_most: float = math.inf,
    none: bool = False,
) -> ValueRule:
    """Declares a finite float within bounds. Whole numbers are accepted, bools and strings are not.

    Args:
        above: the value is larger.
        at_least: the value is at least this.
        below: the value is smaller.
        at_most: the value is at most this.
        none: whether the string "none" is accepted, which means no limit.

    Returns:
        The declaration. Its check returns a float, or None for "none".
    """
    bounds = {"above": above, "of at least": at_least, "below": below, "of at most": at_most}
    limits = [f"{name} {bound:g}" for name, bound in bounds.items() if math.isfinite(bound)]
    rule = " ".join(["a finite number", " and ".join(limits)]).strip()
    rule += f', or "{NONE}"' if none else ""

    def inside(value: float) -> bool:
        return above < value < below and at_least <= value <= at_most

    def check(value: Any) -> float | None:
        if none and (value is None or value == NONE):
            return None
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise RuleBroken(rule)
        try:
            result = float(value)
        except OverflowError:
            result = math.inf
        fits = result == 0 or _SMALLEST <= abs(result) <= FLOAT32_MAX
        if not (fits and inside(result) and inside(to_float32(result))):
            raise RuleBroken(f"{rule}, also as a float32")
        return result

    return ValueRule(rule, check)


def whole(at_least: int = 0, at_most: int = 10_000_000) -> ValueRule:
    """Declares an int within bounds. 25.0 is not accepted.

    Args:
        at_least: the smallest accepted value.
        at_most: the largest accepted value. The default is below 2**24, so values are exact as
            float32 and sums do not overflow int32.
    """
    rule = str(at_least) if at_least == at_most else f"a whole number from {at_least} to {at_most}"

    def check(value: Any) -> int:
        is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not is_whole or not at_least <= int(value) <= at_most:
            raise RuleBroken(rule)
        return int(value)

    return ValueRule(rule, check)


def one_of(*choices: str) -> ValueRule:
    """Declares one of some strings.

    Args:
        *choices: the accepted strings, compared with case. An error lists them, and names the
            choice that a misspelt value probably means.
    """
    rule = "one of " + ", ".join(f'"{each}"' for each in choices)

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise RuleBroken(rule, choices)
        return value

    return ValueRule(rule, check)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise RuleBroken("true or false")
    return value


# The engine's configs may hold arrays instead of Python numbers, so their type is Any.
Positive = Annotated[Any, number(above=0)]
NotNegative = Annotated[Any, number(at_least=0)]
Fraction = Annotated[Any, number(above=0, below=1)]
"""Strictly between 0 and 1: decays, factors."""
Ratio = Annotated[Any, number(at_least=1)]
Limit = Annotated[Any | None, number(above=0, none=True)]
"""An absolute limit, or None for no limit."""
Level = Annotated[Any | None, number(none=True)]
Norm = Annotated[Any, number(above=1e-12)]
"""A gradient norm: the engine sets smaller norms to zero (TINY)."""
Steps = Annotated[Any, whole(1)]
StepsOrZero = Annotated[Any, whole()]
OnOff = Annotated[bool, ValueRule("true or false", _flag)]
