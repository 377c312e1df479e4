"""Marks the dispatch after which all processes of a run vote.

In torch, the mark is a bit in the numbers that the ranks exchange at each step. Compiled steps of
JAX exchange no data of the host. Therefore a process requests a vote in the key-value store of the
coordination service, and a thread in each process reads the request there. The threads then
exchange the number of dispatches that their process has begun, while no process begins another. The
dispatch after the largest number is marked, because no process has begun it. (JAX's
`multihost_utils.reached_preemption_sync_point` works like this, for SIGTERM only.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import jax

from healcore.jax.store.coordination import CoordinatedRanks

_CHECK_INTERVAL_S = 0.5
"""Seconds between two checks for a request. A check takes about 1 ms in the thread."""
_REPEAT_INTERVAL_S = 5.0
"""Seconds until a pending request is repeated, because a rollback may undo the marked step."""
_EXCHANGE_TIMEOUT_S = 120.0
"""Timeout in seconds of the exchange of dispatch numbers, for which the loop waits."""
_JOIN_TIMEOUT_S = 5.0
"""Timeout in seconds for the end of the thread at the end of a run."""


class VoteMarks:
    """The marks of one run. Every process creates one, at the same position in the program."""

    def __init__(self) -> None:
        self._ranks = CoordinatedRanks(timeout_s=_EXCHANGE_TIMEOUT_S)
        self._wanted = False
        self._requested_at: float | None = None
        self._begun = 0
        self._marked: set[int] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def request(self, wanted: bool) -> None:
        """Requests a vote, or withdraws the request. Lock-free, for calls in signal handlers."""
        self._wanted, self._requested_at = wanted, None

    def begin_dispatch(self) -> Callable[[], bool]:
        """Counts a dispatch, and returns a function that tells whether a vote follows it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="healcore-votes", daemon=True)
            self._thread.start()
        with self._lock:
            self._begun += 1
            number = self._begun
        return lambda: number in self._marked

    def close(self) -> None:
        """Ends the thread, because a return from a C++ call during the program's exit can crash."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_JOIN_TIMEOUT_S)

    def _watch(self) -> None:
        """Publishes this process's request, and marks a dispatch if any process requests a vote."""
        try:
            while not self._stop.wait(_CHECK_INTERVAL_S):
                now, last = time.monotonic(), self._requested_at
                if self._wanted and (last is None or now - last > _REPEAT_INTERVAL_S):
                    self._requested_at = now
                    self._ranks.call_together()
                if self._ranks.called_together():
                    with self._lock:
                        self._marked.add(max(self._ranks.gather(self._begun)) + 1)
        except (jax.errors.JaxRuntimeError, OSError):
            pass  # another process has ended, or this program is ending
