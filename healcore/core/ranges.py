"""Declares which values a key of a policy may have, next to the key's default.

    class FixedConfig(NamedTuple):
        max_norm: Positive = 1.0

`healcore.policy` reads a file by such declarations, with pydantic, and the tables of
docs/policies.md are made of them. The engine uses float32, so ranges also hold after rounding. For
example, 0.99999999 is below 1, but its float32 is 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np

NONE = "none"
"""Value of an absent limit in TOML, which has no null."""

_SMALLEST = float(np.finfo(np.float32).tiny)


def to_float32(value: float) -> float:
    """Rounds a number of a policy to what the engine computes with.

    Args:
        value: any number.

    Returns:
        The nearest float32 as a Python float: infinite beyond float32, and 0 for a number so small
        that XLA would flush it to 0.
    """
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float32(value))
    if abs(rounded) < _SMALLEST:
        return 0.0
    return rounded


class Range(NamedTuple):
    """The numbers that a key accepts, as metadata of `Annotated`. None is no bound."""

    kind: type[int] | type[float] = float
    """Whether only whole numbers are accepted; 25.0 is not one."""
    gt: float | None = None
    """The value is larger."""
    ge: float | None = None
    """The value is at least this."""
    lt: float | None = None
    """The value is smaller."""
    le: float | None = None
    """The value is at most this."""
    none: bool = False
    """Whether "none" is accepted, which means no limit."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """How pydantic checks a value."""
        # A late import: the engine does not need pydantic.
        from pydantic_core import core_schema

        bounds: dict[str, Any] = {name: getattr(self, name) for name in ("gt", "ge", "lt", "le")}
        if self.kind is int:
            return core_schema.int_schema(**bounds)
        number = core_schema.float_schema(**bounds, allow_inf_nan=False)
        return core_schema.no_info_wrap_validator_function(self._read, number)

    def _read(self, value: Any, check: Callable[[Any], float]) -> float | None:
        """The value, which also holds the bounds after rounding."""
        if self.none and (value is None or value == NONE):
            return None
        number = check(value)
        check(to_float32(number))
        return number


def whole(at_least: int = 0, at_most: int = 10_000_000) -> Range:
    """Declares an int within bounds.

    Args:
        at_least: the smallest accepted value.
        at_most: the largest accepted value. The default is below 2**24, so values are exact as
            float32 and sums do not overflow int32.
    """
    return Range(int, ge=at_least, le=at_most)


# The engine's configs may hold arrays instead of Python numbers, so their type is Any.
Positive = Annotated[Any, Range(gt=0)]
NotNegative = Annotated[Any, Range(ge=0)]
Fraction = Annotated[Any, Range(gt=0, lt=1)]
"""Strictly between 0 and 1: decays, factors."""
Ratio = Annotated[Any, Range(ge=1)]
Limit = Annotated[Any | None, Range(gt=0, none=True)]
"""An absolute limit, or None for no limit."""
Level = Annotated[Any | None, Range(none=True)]
Norm = Annotated[Any, Range(gt=1e-12)]
"""A gradient norm: the engine sets smaller norms to zero (TINY)."""
Steps = Annotated[Any, whole(1)]
StepsOrZero = Annotated[Any, whole()]
