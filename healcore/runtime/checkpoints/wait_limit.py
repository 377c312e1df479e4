"""How much time of a run its saves may cost."""

from __future__ import annotations

import time

from healcore.runtime.store import CheckpointStore


class WaitLimit:
    """Seconds that saves may cost, over all of them: `seconds`, and a share of the run's time.

    Time that was used is not refunded when the disk keeps up for once: otherwise every other save
    would wait as long as the first.
    """

    def __init__(self, seconds: float, share: float) -> None:
        self._seconds = seconds
        self._share = share
        self._began = time.monotonic()
        self._used = 0.0

    def exceeded(self, store: CheckpointStore) -> bool:
        """Waits for the previous save; whether it is still being written when the time is up."""
        began = time.monotonic()
        left = self._seconds + self._share * (began - self._began) - self._used
        while (busy := store.busy) and time.monotonic() < began + left:
            time.sleep(0.001)
        self._used += time.monotonic() - began
        return busy

    def spend(self, seconds: float) -> None:
        """Counts time that a save itself has taken."""
        self._used += seconds

    @property
    def used_up(self) -> bool:
        """Whether no time is left."""
        return self._used > self._seconds + self._share * (time.monotonic() - self._began)
