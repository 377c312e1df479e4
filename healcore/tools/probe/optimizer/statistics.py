"""One pass over the moments of a parameter, a piece at a time."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from healcore.tools.probe.contents import Array
from healcore.tools.probe.optimizer.slots import Slot


class Moments(NamedTuple):
    """What was found in the moments of one parameter."""

    name: str
    like: str
    """What it has in common with its like in other layers."""
    size: int
    nonfinite: int
    """NaN and Inf, in all of its moments."""
    negative: int
    """Second moments below 0, which no average of squares is."""
    zeros: int
    """Second moments of exactly 0."""
    mean: float
    """Of the finite second moments."""
    step: float | None
    beta2: float

    @property
    def dead(self) -> bool:
        """Whether no gradient ever was anything but 0."""
        return self.size > 0 and self.zeros == self.size

    @property
    def log_v_hat(self) -> float | None:
        """Log of the mean second moment, corrected for its start at 0; None of a dead one."""
        if not self.mean > 0 or not math.isfinite(self.mean):
            return None
        correction = 1.0
        if self.step is not None and self.step > 0 and 0 < self.beta2 < 1:
            correction = -math.expm1(self.step * math.log(self.beta2))
        return math.log(self.mean) - math.log(correction)


def measured(slot: Slot, name: str, like: str, beta2: float, step: float | None) -> Moments:
    """Reads the moments of a parameter.

    Args:
        slot: where they are.
        name: of the parameter.
        like: what it has in common with its like.
        beta2: where the slot does not say.
        step: where the slot does not say.
    """
    size = nonfinite = negative = zeros = finite = 0
    total = 0.0
    for read in slot.second.read():
        # Of complex parameters torch averages the squares of both parts, each for itself.
        piece = read.view(np.real(read).dtype) if np.iscomplexobj(read) else read
        good = np.isfinite(piece)
        values = piece if good.all() else piece[good]
        size += len(piece)
        nonfinite += len(piece) - len(values)
        negative += int(np.count_nonzero(values < 0))
        zeros += int(np.count_nonzero(values == 0))
        finite += len(values)
        total += float(values.sum(dtype=np.float64))
    return Moments(
        name=name,
        like=like,
        size=size,
        nonfinite=nonfinite + sum(map(_nonfinite, slot.beside)),
        negative=negative,
        zeros=zeros,
        mean=total / finite if finite else math.nan,
        step=step if slot.step is None else slot.step,
        beta2=beta2 if slot.beta2 is None else slot.beta2,
    )


def _nonfinite(array: Array) -> int:
    return sum(int(np.count_nonzero(~np.isfinite(piece))) for piece in array.read())
