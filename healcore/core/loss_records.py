"""The all-time records of the loss, for the detectors `records` and `instability`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics


class History(NamedTuple):
    """Extremes of the loss since the start of the history."""

    highest: Any  # float32: the largest loss
    lowest: Any  # float32: the smallest loss
    last: Any  # float32: the last record that counted, at first the first loss


def init() -> History:
    """No loss seen."""
    return History(*(np.zeros((), np.float32) for _ in range(3)))


def update(
    history: History, loss: Any, growth: Any, first: Any, learn: Any, *, xp: Any
) -> tuple[History, Any]:
    """Learns a loss, and says whether it is a record.

    A record exceeds all losses before it, and the last record by the share `growth` of that
    record's height above the lowest loss.

    Args:
        history: of the losses before.
        loss: float32, finite.
        growth: the share, at least 0.
        first: bool: the loss begins a history.
        learn: bool: the loss counts; without it the history stays, and there is no record.
        xp: the array namespace.

    Returns:
        The new history, and bool: a record.
    """
    highest, lowest, last = (xp.where(first, loss, each) for each in history)
    margin = numerics.product(growth, last - lowest, xp=xp)
    record = learn & (loss > highest) & (loss > last + margin)
    return History(
        xp.where(learn, numerics.larger(loss, highest, xp=xp), highest),
        xp.where(learn, numerics.smaller(loss, lowest, xp=xp), lowest),
        xp.where(record, loss, last),
    ), record
