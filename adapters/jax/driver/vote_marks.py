"""Marks the dispatch at which the processes of a run vote, the same in all of them.

In torch the mark is a bit in the numbers that the ranks exchange at each step. Compiled steps of
JAX exchange nothing of the host's. A process that wants a vote therefore says so in the key-value
store of the coordination service, and a thread in each process sees the request there. The threads
then exchange how many dispatches their process has begun. The dispatch after the largest number is
marked: no process has begun it, because no process begins a dispatch meanwhile. (JAX's
`multihost_utils.reached_preemption_sync_point` works like this, for SIGTERM alone.)
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax

from healcore.jax.store.coordination import CoordinatedRanks

_LOOKS_EVERY_S = 0.5
"""Seconds between two looks for a request. A look takes about 1 ms, in the thread."""
_ASKS_AGAIN_S = 5.0
"""Seconds until a request without an answer is repeated: a rollback may undo the marked step."""
_ANSWER_S = 120.0
"""Longest time for which the loop waits while the processes exchange their numbers."""
_ENDS_WITHIN_S = 5.0
"""Longest time for which the end of a run waits for the thread."""


class VoteMarks:
    """The marks of one run. Every process makes one, at the same place in the program."""

    def __init__(self) -> None:
        self._ranks = CoordinatedRanks(timeout_s=_ANSWER_S)
        self._wanted = False
        self._asked_at: float | None = None
        self._begun = 0
        self._marked: set[int] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def request(self, wanted: bool) -> None:
        """Requests a vote, or withdraws the request. No lock: signal handlers call it too."""
        self._wanted, self._asked_at = wanted, None

    def begin_dispatch(self) -> Callable[[], bool]:
        """Counts a dispatch; whether the processes vote after it. Waits while one is marked."""
        if self._thread is None:
            watch = weakref.WeakMethod(self._look)
            self._thread = threading.Thread(
                target=_watch, args=(watch, self._stop), name="healcore-votes", daemon=True
            )
            self._thread.start()
        with self._lock:
            self._begun += 1
            number = self._begun
        return lambda: number in self._marked

    def close(self) -> None:
        """Ends the thread, which must not return from a call in C++ while the program exits."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_ENDS_WITHIN_S)

    def _look(self) -> None:
        """Publishes the request of this process; marks a dispatch if there is a request."""
        now = time.monotonic()
        if self._wanted and (self._asked_at is None or now - self._asked_at > _ASKS_AGAIN_S):
            self._asked_at = now
            self._ranks.call_together()
        if self._ranks.called_together():
            with self._lock:
                self._marked.add(max(self._ranks.gather(self._begun)) + 1)


def _watch(look: Any, stop: threading.Event) -> None:
    while not stop.wait(_LOOKS_EVERY_S):
        method = look()
        if method is None:
            return
        try:
            method()
        except (jax.errors.JaxRuntimeError, OSError):
            return  # another process has gone, or this program is at its end
