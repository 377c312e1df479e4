"""Whether a loop goes on from where its run was put back to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from healcore.jax.state import HealStateError


class Branch(NamedTuple):
    """A state that was put in the place of the live one. Numbers of judged steps, by engine."""

    start: np.ndarray
    """In the state that was put there."""
    ahead: np.ndarray
    """In the state that was there before."""
    stride: np.ndarray | None
    """How many the last update before had; a scan over steps has several. None: not known yet."""

    def left_by(self, steps: Sequence[Any]) -> bool:
        """Whether an update has judged anything since. A sync.

        Args:
            steps: the engines' counters after the update.

        Raises:
            HealStateError: it was not taken from here.
        """
        moved = np.asarray(jax.device_get(list(steps))) - self.start
        elsewhere = moved < 0
        if self.stride is not None:
            # Whoever went on from the state of before is at least as far as that was, and farther
            # from here than one update goes.
            farther = moved > np.maximum(self.stride, 1)
            elsewhere |= farther & (moved + self.start >= self.ahead)
        if elsewhere.any():
            raise HealStateError(
                "this state does not come from the one that the run was put back to: after a "
                "rollback or a resume take the next step from healer.state, not from a variable "
                "of your own"
            )
        return bool(moved.any())
