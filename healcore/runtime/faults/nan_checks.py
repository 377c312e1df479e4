"""Recognizes a program that raises because a value is NaN, by the values in its traceback.

Many programs check the loss themselves and end: `raise ValueError("loss is nan")`, `sys.exit(1)`,
`torch.autograd.set_detect_anomaly(True)`, or a distribution that checks its arguments. Such a check
takes the step away from the policy, which would skip it. The text of an exception is not searched,
because it can be about anything; the variables of the functions that raised are facts.
"""

from __future__ import annotations

import math
from types import FrameType
from typing import Any

OTHER_TYPES = (
    OSError,
    LookupError,
    ImportError,
    NameError,
    AttributeError,
    TypeError,
    MemoryError,
    StopIteration,
)
"""Exceptions that no check for NaN raises."""
_MAX_VARIABLES = 300
"""Max variables of a function to look at."""
_MAX_ELEMENTS = 1 << 22
"""Max number of elements of an array to look at."""
_MAX_ITEMS = 16
"""Max items of a container to look at."""


def nan_variables(error: BaseException) -> list[str]:
    """Finds variables with NaN in the functions that an exception has left.

        nan_variables(error)  # ["value", "loss"]

    Looks at numbers, tensors and arrays, also within a batch (a list, tuple or mapping). Waits for
    the device.

    Args:
        error: the exception, with its traceback.

    Returns:
        The names, innermost function first, names of the program before names of libraries. Empty
        for an exception that no check for NaN raises.
    """
    if isinstance(error, OTHER_TYPES):
        return []
    in_program: list[str] = []
    in_libraries: list[str] = []
    trace = error.__traceback__
    while trace is not None:
        names = _nan_variables_of(trace.tb_frame)
        if "site-packages" in trace.tb_frame.f_code.co_filename:
            in_libraries = names + in_libraries
        else:
            in_program = names + in_program
        trace = trace.tb_next
    return list(dict.fromkeys(in_program + in_libraries))


def _nan_variables_of(frame: FrameType) -> list[str]:
    """Names of the variables of one function, or of a script, that have NaN."""
    variables = frame.f_locals
    depth, max_elements = 2, _MAX_ELEMENTS
    if variables is frame.f_globals:
        # A script's own variables include its whole data set, which may have NaN by design.
        depth, max_elements = 0, 1
    names = []
    for name, value in list(variables.items())[:_MAX_VARIABLES]:
        if not name.startswith("_") and _has_nan(value, depth, max_elements):
            names.append(name)
    return names


def _has_nan(value: Any, depth: int, max_elements: int) -> bool:
    """Whether a number, an array, or an item of a container is NaN. False if that is unknown.

    Args:
        value: any value of a program's variable.
        depth: levels of containers to look into.
        max_elements: a larger array is not read, because that would take time.
    """
    if isinstance(value, float):
        return math.isnan(value)
    if isinstance(value, list | tuple | dict):
        if depth == 0:
            return False
        items = list(value.values()) if isinstance(value, dict) else list(value)
        return any(_has_nan(item, depth - 1, max_elements) for item in items[:_MAX_ITEMS])
    try:
        if isinstance(value, type) or not (hasattr(value, "dtype") and hasattr(value, "shape")):
            return False
        return math.prod(value.shape) <= max_elements and bool((value != value).any())
    except Exception:  # an array that JAX has deleted, a lazy tensor, a device that has failed
        return False
