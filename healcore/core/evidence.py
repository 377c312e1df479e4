"""Which tensors' gradients were not finite or stood out in a step that raised an alarm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from healcore.core import numerics

MOST = 10
"""Tensors named at most."""

STANDS_OUT = 4.0
"""Times its norm at the last step without an alarm. From one such step of the demo's transformer to
the next a tensor's norm grows to 2.1 times (99th percentile of 4,116), 3.5 at most."""


class Evidence(NamedTuple):
    """One tensor or layer whose gradient was non-finite or stood out."""

    name: str
    """As its framework names it: `layers.3.weight`, `['params']['Dense_0']['kernel']`."""
    grad_norm: float
    """L2, float32, before clipping; NaN and Inf are evidence."""


def evidence(
    norms: np.ndarray, usual: np.ndarray | None, names: Sequence[str]
) -> tuple[Evidence, ...]:
    """The tensors to look at: not finite first, then by how many times the usual norm.

    Args:
        norms: float32 (n,), L2 norms of the gradients in the step with the alarm.
        usual: (n,), those of the last step without one; 0: not known; None: there was none.
        names: of the n tensors.
    """
    usual = np.zeros_like(norms) if usual is None else usual
    with np.errstate(all="ignore"):
        ratios = np.where(usual > 0, norms / usual, 0.0)
    ratios[~(norms <= numerics.HUGE)] = np.inf  # no step may have these
    worst = np.argsort(-ratios, kind="stable")[:MOST]
    return tuple(Evidence(str(names[i]), float(norms[i])) for i in worst if ratios[i] >= STANDS_OUT)
