"""Recognizes a program that raises because a value is NaN, by the values in its traceback.

Many programs check the loss themselves and end: `raise ValueError("loss is nan")`, `sys.exit(1)`,
`torch.autograd.set_detect_anomaly(True)`, or a distribution that checks its arguments. Such a check
takes the step away from the policy, which would skip it. The text of an exception is not searched,
because it can be about anything; the variables of the functions that raised are facts.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

OTHER_TYPES = (
    *(OSError, LookupError, ImportError, NameError, AttributeError, TypeError, MemoryError),
    StopIteration,
)
"""Exceptions that no check for NaN raises."""
MOST = 300
"""Variables of each function to look at."""
LARGEST = 1 << 22
"""Number of elements of the largest array to look at."""


def nan_variables(error: BaseException) -> list[str]:
    """Names of variables with NaN in the functions that the exception has left, innermost first.

        nan_variables(error)  # ["value", "loss"]

    Looks at numbers, tensors and arrays, and at those in a batch (a list, tuple or mapping). Waits
    for the device.
    """
    own: list[str] = []
    of_libraries: list[str] = []
    trace = None if isinstance(error, OTHER_TYPES) else error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        # A script's own variables include its whole data set, which may have NaN by design.
        is_script = frame.f_locals is frame.f_globals
        depth, largest = (0, 1) if is_script else (2, LARGEST)
        found = [
            name
            for name, value in itertools.islice([*frame.f_locals.items()], MOST)
            if name[:1] != "_" and _has_nan(value, depth, largest)
        ]
        is_library = "site-packages" in frame.f_code.co_filename
        names = of_libraries if is_library else own
        names[:0] = found
        trace = trace.tb_next
    return list(dict.fromkeys(own + of_libraries))


def _has_nan(value: Any, depth: int, largest: int) -> bool:
    """Whether a number, an array, or an item of a container is NaN. False if that is unknown."""
    if isinstance(value, float):
        return math.isnan(value)
    if isinstance(value, list | tuple | dict):
        items = [*(value.values() if isinstance(value, dict) else value)] if depth else []
        return any(_has_nan(each, depth - 1, largest) for each in items[:16])
    try:
        if isinstance(value, type) or not (hasattr(value, "dtype") and hasattr(value, "shape")):
            return False
        return math.prod(value.shape) <= largest and bool((value != value).any())
    except Exception:  # an array that JAX has deleted, a lazy tensor, a device that has failed
        return False
