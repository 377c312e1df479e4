"""What the processes of `jax.distributed` agree on: small items, and the end of a run.

In torch, the ranks exchange numbers at each step, and a bit among them asks for a vote on the end.
Compiled steps of JAX exchange no data of the host. Therefore a process requests a vote in the
key-value store of JAX's coordination service, and a thread in each process reads the request there.
The threads then exchange the number of dispatches that their process has begun, while no process
begins another. The dispatch after the largest number is marked, because no process has begun it.
(JAX's `multihost_utils.reached_preemption_sync_point` works like this, for SIGTERM only.)
"""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from healcore.runtime.store.checkpoints import StoreError
from healcore.runtime.store.ranks import RankFailed

T = TypeVar("T")

_TIMEOUT_S = 1800.0
"""Timeout of an exchange in seconds. Long, because rank 0 may be writing a large checkpoint; JAX's
heartbeats detect an ended process earlier."""

_CHECK_INTERVAL_S = 0.5
"""Seconds between two checks for a request of a vote. A check takes about 1 ms in the thread."""
_EXCHANGE_TIMEOUT_S = 120.0
"""Timeout in seconds of the exchange of dispatch numbers, for which the loop waits."""
_JOIN_TIMEOUT_S = 5.0
"""Timeout in seconds for the end of the thread at the end of a run."""
_numbers = itertools.count()
"""Numbers of the objects of this process, which are a part of their keys."""


class CoordinatedRanks:
    """Exchanges over the key-value store of JAX's coordination service, without devices.

    `multihost_utils.process_allgather` is a collective of the devices. In the store's background
    thread, its order among the collectives of the training would differ between processes. JAX has
    no public function for its key-value store; Orbax uses the same client for its barriers.

    Each object has its own keys, numbered in the order of construction. Therefore every process has
    to construct these objects at the same positions in the program.

    Args:
        timeout_s: timeout of an exchange in seconds.

    Raises:
        StoreError: `jax.distributed.initialize` was not called.
    """

    def __init__(self, timeout_s: float = _TIMEOUT_S) -> None:
        self.rank = jax.process_index()
        self.world = jax.process_count()
        from jax._src import distributed  # no public function returns the client

        self._client: Any = distributed.global_state.client
        if self._client is None:
            raise StoreError(
                f"this program has {self.world} processes, which exchange data over "
                "jax.distributed: call jax.distributed.initialize() at its start"
            )
        self._timeout_s = timeout_s
        self._prefix = f"healcore/{next(_numbers)}"
        self._exchanges = 0
        self._failure: RankFailed | None = None

    def gather(self, item: T) -> list[T]:
        """Every rank's item, on every rank. All ranks have to call it, in the same order.

        Args:
            item: any value that pickle can store. The other ranks unpickle it.

        Returns:
            The items, by rank.

        Raises:
            RankFailed: a process did not join this exchange or an earlier exchange in time.
        """
        if self._failure is not None:  # other processes may still wait in the failed exchange
            raise self._failure
        number = self._exchanges
        self._exchanges += 1
        keys = [f"{self._prefix}/{number}/{rank}" for rank in range(self.world)]
        last = f"{self._prefix}/{number - 1}/{self.rank}"
        self._client.key_value_set_bytes(keys[self.rank], pickle.dumps(item))
        items = [pickle.loads(self._read(rank, key)) for rank, key in enumerate(keys)]
        if number:
            # All processes have joined this exchange, so they have read the keys of the last one.
            self._client.key_value_delete(last)
        return items

    def call_together(self) -> None:
        """Requests the next exchange from all processes; see `called_together`.

        A process that needs an exchange cannot begin it alone, because the other processes would
        not join it. It publishes a key, for which each process looks from time to time.
        """
        self._client.key_value_set_bytes(self._request_key(), b"", allow_overwrite=True)

    def called_together(self) -> bool:
        """Whether any process has requested the next exchange by `call_together`. Does not wait.

        A process that reads True calls `gather`, for which the other processes wait.

        Raises:
            jax.errors.JaxRuntimeError: the coordination service has ended.
        """
        try:
            self._client.key_value_try_get_bytes(self._request_key())
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return False
            raise
        return True

    def _request_key(self) -> str:
        """The key by which a process requests the next exchange."""
        return f"{self._prefix}/call/{self._exchanges}"

    def _read(self, rank: int, key: str) -> bytes:
        """Waits for the item of a process. Raises RankFailed if it does not come in time."""
        try:
            return self._client.blocking_key_value_get_bytes(key, round(self._timeout_s * 1000))
        except jax.errors.JaxRuntimeError as error:
            self._failure = RankFailed(
                f"process {rank} of {self.world} has not joined an exchange within "
                f"{self._timeout_s:g} s ({str(error).splitlines()[0]:.200}): is it alive, and does "
                "every process run the same program?"
            )
            raise self._failure from error


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
