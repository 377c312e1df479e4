"""`CoordinatedRanks`: exchanges small items between the processes of `jax.distributed`."""

from __future__ import annotations

import itertools
import pickle
from typing import Any, TypeVar

import jax

from healcore.runtime.store.checkpoints import StoreError
from healcore.runtime.store.ranks import RankFailed

T = TypeVar("T")

_TIMEOUT_S = 1800.0
"""Timeout of an exchange in seconds. Long, because rank 0 may be writing a large checkpoint; JAX's
heartbeats detect an ended process earlier."""

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
