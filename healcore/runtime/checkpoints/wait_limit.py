"""How long a run waits for a disk that is slower than its saves."""

from __future__ import annotations

import time
from typing import Any

SECONDS = 2.0
"""For all saves of a run together, ..."""
_SHARE = 0.01
"""... and this share of its time besides."""


class WaitLimit:
    """Time that is left for waiting. It does not come back with a disk that keeps up for once.

    If it did, every other save would wait as long as the first.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._waited = 0.0

    def late(self, store: Any) -> bool:
        """Whether the save before is still being written, when there is none left."""
        began = time.monotonic()
        left = SECONDS + _SHARE * (began - self._began) - self._waited
        late = getattr(store, "busy", False)
        while late and time.monotonic() < began + left:
            time.sleep(0.001)
            late = getattr(store, "busy", False)
        self._waited += time.monotonic() - began
        return late
