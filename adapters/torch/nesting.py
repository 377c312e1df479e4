"""Telling a step inside a step from the next step.

A subclass whose `step()` calls `super().step()` fires the hooks twice, and a step that raises
fires the first hook without the second. A flag or a depth counter confuses the two: after one
exception it would take every later step for a nested one and stop healing without a word. The
call stack does not lie: the frame that opened the step is still on it, or it is not.
"""

from __future__ import annotations

import os
import sys
from types import FrameType

_OPTIMIZER_FILE = os.path.join("torch", "optim", "optimizer.py")


class OpenStep:
    """The frame of the `Optimizer.step` that is under way, if there is one."""

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        self._inner = 0

    @property
    def is_open(self) -> bool:
        """Whether a step was begun and not ended; it may have ended in an exception."""
        return self._frame is not None

    def enter(self) -> bool:
        """Begins a step; call it from the pre-hook.

        Returns:
            True for a step of its own, False for one nested in the step under way.
        """
        if self._frame is not None and self._on_stack(self._frame):
            self._inner += 1
            return False
        self._frame = _optimizer_frame()
        self._inner = 0
        return True

    def leave(self) -> bool:
        """Ends a step; call it from the post-hook. True unless it ends a nested one."""
        if self._inner:
            self._inner -= 1
            return False
        self._frame = None
        return True

    def unwind(self) -> None:
        """An exception is about to end the nested steps, and is caught by the outermost."""
        self._inner = 0

    def forget(self) -> None:
        """Drops the frame (and what its locals keep alive)."""
        self._frame, self._inner = None, 0

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
