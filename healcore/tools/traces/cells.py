"""From a cell or a JSON value to a number."""

from __future__ import annotations

import math
from typing import Any

NOT_LOGGED = frozenset({"", "none", "null", "na", "n/a", "<na>"})
"""Cells that say that nothing was logged. "nan" is not one of them: it is a value, and bad news."""


def from_text(cell: str) -> float | None:
    """The number in a cell; None if nothing was logged.

    Raises:
        ValueError: neither a number nor one of the words for nothing.
    """
    try:
        if "_" not in cell:  # float("1_000") is Python source, not data
            return float(cell)
    except ValueError:
        pass
    if cell.strip().lower() in NOT_LOGGED:
        return None
    raise ValueError(f"{shown(cell)} is not a number")


def from_json(value: Any) -> float | None:
    """The number in a JSON value; a text counts as a cell does.

    Raises:
        ValueError: not a number.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return from_text(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # a whole number beyond float64
            return math.inf if value > 0 else -math.inf
    raise ValueError(f"{shown(str(value))} is not a number")


def shown(text: str) -> str:
    """A piece of a damaged file, fit for a message."""
    return repr(text if len(text) <= 40 else f"{text[:37]}...")
