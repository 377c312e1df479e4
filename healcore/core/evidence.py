"""Which tensors had gradients that were not finite or unusually large, in a step with an alarm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from healcore.core import numerics

MOST = 10  # tensors per step

STANDS_OUT = 4.0
"""Multiple of its norm at the last step without an alarm. In the demo's transformer a tensor's norm
grows to 2.1 times from one such step to the next (99th percentile of 4,116), 3.5 at most."""


class Evidence(NamedTuple):
    """A tensor or layer whose gradient was not finite or unusually large."""

    name: str
    """As its framework names it: `layers.3.weight`, `['params']['Dense_0']['kernel']`."""
    grad_norm: float
    """L2, float32, before clipping; NaN and Inf are evidence."""


def evidence(
    norms: np.ndarray, usual: np.ndarray | None, names: Sequence[str]
) -> tuple[Evidence, ...]:
    """The worst tensors: not finite first, then by ratio to the usual norm.

    `usual` are the L2 norms at the last step without an alarm: 0 if not known, None without such a
    step.
    """
    usual = np.zeros_like(norms) if usual is None else usual
    with np.errstate(all="ignore"):
        ratios = np.where(usual > 0, norms / usual, 0.0)
    ratios[~(norms <= numerics.HUGE)] = np.inf  # evidence without a usual norm too
    worst = np.argsort(-ratios, kind="stable")[:MOST]
    return tuple(Evidence(str(names[i]), float(norms[i])) for i in worst if ratios[i] >= STANDS_OUT)
