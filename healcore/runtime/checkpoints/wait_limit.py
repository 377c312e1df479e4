"""How long a run waits for a disk that is slower than its saves."""

from __future__ import annotations

import time
from typing import Any

SECONDS = 2.0
"""Waiting time for all saves of a run together, ..."""
_SHARE = 0.01
"""... and this share of its run time in addition."""


class WaitLimit:
    """The waiting time that is left. It is not refunded when the disk keeps up for once.

    If it were, every other save would wait as long as the first.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._waited = 0.0

    def exceeded(self, store: Any) -> bool:
        """Waits for the previous save; whether it is still being written when the time is up."""
        began = time.monotonic()
        left = SECONDS + _SHARE * (began - self._began) - self._waited
        busy = getattr(store, "busy", False)
        while busy and time.monotonic() < began + left:
            time.sleep(0.001)
            busy = getattr(store, "busy", False)
        self._waited += time.monotonic() - began
        return busy
