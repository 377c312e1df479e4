"""Which arrays of a checkpoint hold NaN or Inf, read a piece at a time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from healcore.tools.probe.contents import Contents, dotted
from healcore.tools.probe.verdict import ProbeError


class Looked(NamedTuple):
    """What was found."""

    arrays: int
    nonfinite: dict[str, int]
    """Name of array -> how many of its elements."""
    unreadable: tuple[str, ...]
    """Why some arrays could not be read."""


def look(contents: Contents) -> Looked:
    """Reads every array that can hold NaN."""
    nonfinite: dict[str, int] = {}
    unreadable = []
    seen = set()
    for array in contents.arrays:
        if array.storage is not None and array.storage in seen:
            continue
        seen.add(array.storage)
        if array.dtype.startswith(("int", "uint", "bool")):
            continue
        bad = 0
        try:
            for piece in array.read():
                bad += len(piece) - int(np.count_nonzero(np.isfinite(piece)))
        except (ProbeError, ValueError, TypeError, RuntimeError) as error:
            unreadable.append(str(error))
            continue
        if bad:
            nonfinite[dotted(array.path)] = bad
    return Looked(len(contents.arrays), nonfinite, tuple(unreadable))
