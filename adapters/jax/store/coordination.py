"""The processes of `jax.distributed`, as stores and the Healer see them."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import jax

from healcore.runtime.store.errors import StoreError
from healcore.runtime.store.ranks import RankFailed

_TIMEOUT_S = 1800.0
"""Seconds for which an exchange waits, as for a group of torch by default: rank 0 may be writing a
large checkpoint. JAX's heartbeats notice an ended process earlier."""

_numbers = itertools.count()


class CoordinatedRanks:
    """Exchanges over the key-value store of JAX's coordination service, without devices.

    `multihost_utils.process_allgather` is a collective of the devices. From the store's background
    thread it would mix with the collectives of the training, in another order in each process. JAX
    has no public function for its key-value store; Orbax uses the same client for its barriers.

    The objects have separate keys, numbered in the order of construction: every process makes them
    at the same places in the program.

    Args:
        timeout_s: seconds for which an exchange waits for the other processes.

    Raises:
        StoreError: `jax.distributed.initialize` was not called.
    """

    def __init__(self, timeout_s: float = _TIMEOUT_S) -> None:
        self.rank = jax.process_index()
        self.world = jax.process_count()
        self._client = coordination_client()
        self._timeout_s = timeout_s
        self._prefix = f"healcore/{next(_numbers)}"
        self._exchanges = 0
        self._apart: RankFailed | None = None

    def gather(self, item: Any) -> list[Any]:
        """Every rank's item, on every rank.

        Raises:
            RankFailed: a process was too late, for this exchange or for an earlier one.
        """
        if self._apart is not None:  # other processes may still be at that exchange
            raise self._apart
        number, self._exchanges = self._exchanges, self._exchanges + 1
        keys = [self._key(number, rank) for rank in range(self.world)]
        last = self._key(number - 1, self.rank)
        self._client.key_value_set_bytes(keys[self.rank], pickle.dumps(item))
        items = [pickle.loads(self._read(rank, key)) for rank, key in enumerate(keys)]
        if number:
            # All processes are at this exchange, so they have read the keys of the one before.
            self._client.key_value_delete(last)
        return items

    def call_together(self) -> None:
        """Asks all processes for the next exchange; see `called_together`."""
        self._client.key_value_set_bytes(self._call(), b"", allow_overwrite=True)

    def called_together(self) -> bool:
        """Whether any process asks for the next exchange. Does not wait."""
        try:
            self._client.key_value_try_get_bytes(self._call())
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return False
            raise
        return True

    def _call(self) -> str:
        return f"{self._prefix}/call/{self._exchanges}"

    def _key(self, number: int, rank: int) -> str:
        return f"{self._prefix}/{number}/{rank}"

    def _read(self, rank: int, key: str) -> bytes:
        try:
            return self._client.blocking_key_value_get_bytes(key, round(self._timeout_s * 1000))
        except jax.errors.JaxRuntimeError as error:
            self._apart = RankFailed(
                f"process {rank} of {self.world} has not joined an exchange within "
                f"{self._timeout_s:g} s ({str(error).splitlines()[0]:.200}): is it alive, and does "
                "every process run the same program?"
            )
            raise self._apart from error


def coordination_client() -> Any:
    """JAX's client of its coordination service; StoreError if there is none."""
    from jax._src import distributed  # there is no public way to it, see above

    client = distributed.global_state.client
    if client is None:
        raise StoreError(
            f"this program has {jax.process_count()} processes, which exchange over "
            "jax.distributed: call jax.distributed.initialize() at its start"
        )
    return client
