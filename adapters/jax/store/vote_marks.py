"""`VoteMarks`: marks the dispatches after which all processes vote on the end of a run.

In torch, the ranks exchange numbers at each step, and a bit among them asks for a vote. Compiled
steps of JAX exchange no data of the host. Therefore a process requests a vote in the key-value
store of JAX's coordination service, and a thread in each process reads the request there. The
threads then exchange the number of dispatches that their process has begun, while no process begins
another. The dispatch after the largest number is marked, because no process has begun it. (JAX's
`multihost_utils.reached_preemption_sync_point` works like this, for SIGTERM only.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import jax

from healcore.jax.store.coordination import CoordinatedRanks

_CHECK_INTERVAL_S = 0.5
"""Seconds between two checks for a request. A check takes about 1 ms in the thread."""
_EXCHANGE_TIMEOUT_S = 120.0
"""Timeout in seconds of the exchange of dispatch numbers, for which the loop waits."""
_JOIN_TIMEOUT_S = 5.0
"""Timeout in seconds for the end of the thread at the end of a run."""


class VoteMarks:
    """Marks the dispatches of one run after which all processes vote.

    Every process creates one object, at the same position in the program. If one process decides
    to stop, for example at SIGTERM, all other processes have to stop after the same dispatch.
    Otherwise they wait in a collective of the next step for a process that has left:

        process 0   request()      thread: call_together()
        both        threads see the request, gather the numbers of begun dispatches: 7 and 8
        both        dispatch 9 is marked, which no process has begun; both vote after it
    """

    def __init__(self) -> None:
        self._ranks = CoordinatedRanks(timeout_s=_EXCHANGE_TIMEOUT_S)
        self._requested = False
        self._begun = 0
        self._marked: set[int] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="healcore-votes", daemon=True)
        self._thread.start()

    def request(self) -> None:
        """Requests a vote. Lock-free, because a signal handler calls it.

        A signal may interrupt the thread that holds a lock, and a handler that waits for this lock
        never returns. So this method only sets a flag, and the thread publishes the request.
        """
        self._requested = True

    def begin_dispatch(self) -> Callable[[], bool]:
        """Counts a dispatch, before which the thread may still mark it.

        Returns:
            A function that returns whether a vote follows this dispatch. Its answer is the same in
            all processes once the records of the dispatch have been read.
        """
        with self._lock:
            self._begun += 1
            number = self._begun
        return lambda: number in self._marked

    def close(self) -> None:
        """Ends the thread at the end of a run, and waits for it a few seconds.

        A return from a C++ call during the program's exit can crash, so no thread may be in such a
        call then.
        """
        self._stop.set()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _watch(self) -> None:
        """Publishes this process's request, and marks a dispatch if any process requests a vote."""
        try:
            while not self._stop.wait(_CHECK_INTERVAL_S):
                if self._requested:  # again and again, because a rollback may undo the marked step
                    self._ranks.call_together()
                if self._ranks.called_together():
                    with self._lock:
                        self._marked.add(max(self._ranks.gather(self._begun)) + 1)
        except (jax.errors.JaxRuntimeError, OSError):
            pass  # another process has ended, or this program is ending
