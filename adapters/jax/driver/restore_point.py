"""`RestorePoint`: checks that a loop goes on from the state that was restored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from healcore.jax.state import HealStateError


class RestorePoint(NamedTuple):
    """The engines' step counters when a state was restored: int arrays, one element per engine."""

    start: np.ndarray
    """In the restored state."""
    ahead: np.ndarray
    """In the state that it replaced."""
    stride: np.ndarray | None
    """Steps of the last update before; a scan over steps has several. None: not known yet."""

    def has_advanced(self, steps: Sequence[Any]) -> bool:
        """Whether an update has judged a step since. A sync.

        Args:
            steps: the engines' counters after the update.

        Raises:
            HealStateError: the update did not start from the restored state.
        """
        moved = np.asarray(jax.device_get(list(steps))) - self.start
        elsewhere = moved < 0
        if self.stride is not None:
            # An update of the replaced state is at least as far as that was, and farther from the
            # restored one than one update goes.
            farther = moved > np.maximum(self.stride, 1)
            elsewhere |= farther & (moved + self.start >= self.ahead)
        if elsewhere.any():
            raise HealStateError(
                "this state does not come from the one that was restored: after a rollback or a "
                "resume take the next step from healer.state, not from a variable of your own"
            )
        return bool(moved.any())
