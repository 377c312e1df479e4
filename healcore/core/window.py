"""The last values of a run, and their sum in one fixed order.

A running sum keeps every rounding error, and one value of 1e15 wipes out all others for good.
`xp.sum` has another order in each backend. So the values are in a ring as long as a power of two
that is folded in half: the same additions everywhere, with the error of a pairwise sum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics


class Window(NamedTuple):
    """A ring of fixed size."""

    values: Any  # float32 (a power of two,): the last values; 0 where there is none
    place: Any  # int32: where the next one goes
    count: Any  # int32: values held, up to the window's length


def init(length: int) -> Window:
    """An empty window of `length` values."""
    slots = 1 << (length - 1).bit_length()
    none = np.zeros((), np.int32)
    return Window(np.zeros((slots,), np.float32), none, none.copy())


def cleared(window: Window, when: Any, *, xp: Any) -> Window:
    """The window, empty where `when` holds."""
    return Window(
        xp.where(when[..., None], 0.0, window.values),
        xp.where(when, 0, window.place),
        xp.where(when, 0, window.count),
    )


def push(window: Window, length: int, value: Any, learn: Any, *, xp: Any) -> Window:
    """Writes `value` over the oldest one where `learn` holds; `length` is that of `init`."""
    slots = window.values.shape[-1]
    here = (xp.arange(slots) == window.place[..., None]) & learn[..., None]
    after = window.place + 1
    return Window(
        xp.where(here, value[..., None], window.values),
        xp.where(learn, xp.where(after < length, after, 0), window.place),
        xp.where(learn & (window.count < length), window.count + 1, window.count),
    )


def mean(window: Window, *, xp: Any) -> Any:
    """Mean of the values; 0 without any."""
    divisor = numerics.as_float(xp.where(window.count > 0, window.count, 1), xp=xp)
    return numerics.quotient(total(window.values), divisor, xp=xp)


def total(values: Any) -> Any:
    """Sum along the last axis, a power of two, in one order for all backends."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def largest(values: Any, *, xp: Any) -> Any:
    """Maximum along the last axis, a power of two."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = numerics.larger(values[..., :half], values[..., half:], xp=xp)
    return values[..., 0]
