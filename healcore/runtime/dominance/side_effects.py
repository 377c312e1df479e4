"""Undoes the side effects of a user's function on Python's and NumPy's random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


@contextmanager
def undone() -> Iterator[None]:
    """Restores the global generators of Python and NumPy after the block."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 -- users do
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002 -- users do
