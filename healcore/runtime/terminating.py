"""SIGTERM: the scheduler wants the machine back. The step under way is finished first."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Terminated(SystemExit):
    """The run was asked to end by a signal; its status is the shell's, 128 + the number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


class Terminating:
    """Notes a SIGTERM instead of dying of it. A second one has its usual effect.

    A handler that was there before is called too. Outside the main thread, where Python has no
    signals, nothing is done.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        """The signal's number, once it has come."""
        self._before: Any = None
        self._set = False

    def watch(self) -> None:
        """Begins."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
            self._set = True

    def release(self) -> None:
        """Puts the earlier handler back."""
        if self._set:
            # None: it was set by something that is not Python, and cannot be put back from here.
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
            self._set = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = number
        before = self._before
        self.release()
        if callable(before):
            before(number, frame)
