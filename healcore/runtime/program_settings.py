"""The values of `Driver.settings`: hyperparameters as JSON values, and a digest of the weights.

A restart compares the settings of the program with the settings of the run, and names what the user
has changed.
"""

from __future__ import annotations

import math
from typing import Any

WEIGHTS = "initial weights"
"""Name of the digest of the weights in `Driver.settings`."""
STEPPED = ", stepped"
"""End of the digest of a program that has loaded a snapshot: its optimizers have stepped before."""


def json_setting(value: Any) -> Any:
    """A hyperparameter as a JSON value, for `Driver.settings`.

    Args:
        value: any object.

    Returns:
        The bool, text, number or list. NaN and Inf become texts, because JSON has no number for
        them. None for a tensor, a function or another object, and for a list with such an item.
    """
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        if math.isfinite(value):
            return value
        return str(value)
    if isinstance(value, tuple | list):
        items = [json_setting(each) for each in value]
        if items and None not in items:
            return items
    return None
