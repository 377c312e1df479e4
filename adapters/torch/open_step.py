"""Distinguishes a nested `Optimizer.step` from the next step.

A subclass whose `step()` calls `super().step()` fires the hooks twice, and a step that raises
fires the pre-hook without the post-hook. A flag or a depth counter confuses the two: after one
exception it would take every later step for a nested one, and healing would end without notice.
The call stack is reliable: the frame that began the step is still on it, or it is not.
"""

from __future__ import annotations

import os
import sys
from types import FrameType

_OPTIMIZER_FILE = os.path.join("torch", "optim", "optimizer.py")


class OpenStep:
    """The frame of the `Optimizer.step` that is running, if any."""

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        self._nested = 0

    @property
    def is_open(self) -> bool:
        """Whether a step began and did not end; it may have ended in an exception."""
        return self._frame is not None

    def enter(self) -> bool:
        """Begins a step; call it from the pre-hook.

        Returns:
            True for an outermost step, False for one nested in the running step.
        """
        if self._frame is not None and self._on_stack(self._frame):
            self._nested += 1
            return False
        self._frame = _optimizer_frame()
        self._nested = 0
        return True

    def leave(self) -> bool:
        """Ends a step; call it from the post-hook. True for an outermost step."""
        if self._nested:
            self._nested -= 1
            return False
        self._frame = None
        return True

    def unwind(self) -> None:
        """An exception is about to end the nested steps, and the outermost one catches it."""
        self._nested = 0

    def clear(self) -> None:
        """Drops the frame (and what its locals keep alive)."""
        self._frame, self._nested = None, 0

    @staticmethod
    def _on_stack(frame: FrameType) -> bool:
        at: FrameType | None = sys._getframe(1)
        while at is not None:
            if at is frame:
                return True
            at = at.f_back
        return False


def _optimizer_frame() -> FrameType:
    """The nearest frame of torch's hook wrapper, which outlives both hooks."""
    at: FrameType | None = sys._getframe(2)
    while at is not None:
        if at.f_code.co_filename.endswith(_OPTIMIZER_FILE):
            return at
        at = at.f_back
    return sys._getframe(3)
