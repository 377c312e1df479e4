"""`CoordinatedRendezvous`: processes that end at different moments find each other.

A process whose loop raises leaves the others in a collective of the compiled step. JAX cannot
cancel it, and ends them only when that process has gone. So a thread of each process looks in JAX's
key-value store for processes that have left, and shuts down its own end of their connections: the
collective raises, and this process comes to the end of its `with` block. There all of them meet in
the key-value store, which needs no collective.
"""

from __future__ import annotations

import pickle
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import jax

from healcore.jax.store.coordination import CoordinatedRanks, coordination_client, leave_exchanges
from healcore.runtime import tcp_connections
from healcore.runtime.store.ranks import Ranks

_LOOKS_EVERY_S = 1.0
"""A look takes about 1 ms, in the thread."""
_ENDS_WITHIN_S = 5.0
"""For which the end of a run waits for the thread."""


class CoordinatedRendezvous:
    """Implements `healcore.runtime.driver.Rendezvous` for processes that exchange over gloo.

    Args:
        ranks: of the run. Every process makes it at the same place of the program.
    """

    def __init__(self, ranks: CoordinatedRanks) -> None:
        self._ranks = ranks
        self.world = ranks.world
        self._client = coordination_client()
        self._name = f"{ranks.name}/end"
        self._seen: set[str] = set()
        stop = threading.Event()
        watch = weakref.WeakMethod(self._look)
        thread = threading.Thread(
            target=_watch, args=(watch, stop), name="healcore-rendezvous", daemon=True
        )
        # Also at the end of the program, where it must not come back from a call in C++.
        self._end = weakref.finalize(self, _end, stop, thread)
        thread.start()

    def put(self, what: str, item: Any) -> None:
        """Leaves an item for the others."""
        data = pickle.dumps(item)
        self._client.key_value_set_bytes(f"{self._name}/last/{what}", data, allow_overwrite=True)
        self._client.key_value_increment(f"{self._name}/count/{what}", 1)

    def last(self, what: str) -> Any | None:
        """The last item of any process."""
        try:
            return pickle.loads(self._client.key_value_try_get_bytes(f"{self._name}/last/{what}"))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def count(self, what: str) -> int:
        """How many there were."""
        return self._client.key_value_increment(f"{self._name}/count/{what}", 0)

    def connected(self) -> bool:
        """True: JAX itself ends the processes when one of them has gone."""
        return True

    def in_collective(self, frame: FrameType) -> bool:
        """False: a dispatch does not wait, so a process that goes on is a step ahead."""
        return False

    def post(self, item: Any) -> None:
        """Leaves this process's item for the others, numbered in the order of all their calls."""
        number = self._client.key_value_increment(f"{self._name}/posts", 1)
        data = pickle.dumps((number, item))
        self._client.key_value_set_bytes(self._key("item", self._ranks.rank), data)
        self._client.key_value_set_bytes(f"{self._name}/posted", b"", allow_overwrite=True)

    def posted(self) -> bool:
        """Whether any process has posted."""
        try:
            self._client.key_value_try_get_bytes(f"{self._name}/posted")
        except jax.errors.JaxRuntimeError as error:
            # Otherwise process 0, which runs the service, has ended.
            return "NOT_FOUND" not in str(error)
        return True

    def lost_peer(self, error: BaseException | None) -> bool:
        """Whether gloo has raised because a connection has broken."""
        return tcp_connections.has_broken(error)

    def interrupt_others(self) -> None:
        """Ends the exchanges and collectives in which others wait for this one: they raise."""
        leave_exchanges()
        own = pickle.dumps([*tcp_connections.connections().values()])
        self._client.key_value_set_bytes(self._key("left", self._ranks.rank), own)

    def collect(self, seconds: float) -> list[tuple[int, Any] | None]:
        """Number and item of every process; None for those that have not come in this time."""
        return self._of_all("item", seconds)

    def leave(self, ranks: Sequence[Ranks]) -> None:
        """Makes exchanges of these raise, in all processes."""
        for each in ranks:
            if isinstance(each, CoordinatedRanks):
                each.leave()

    def answers(self, mine: Any, seconds: float) -> list[Any]:
        """Every process's answer; None for those that have not come in this time, or have gone."""
        key = self._key("answer", self._ranks.rank)
        self._client.key_value_set_bytes(key, pickle.dumps(mine))
        return self._of_all("answer", seconds)

    def renew(self, ranks: Sequence[Ranks], seconds: float) -> None:
        """New exchanges for these `ranks`, which raise after `seconds`."""
        for each in ranks:
            if isinstance(each, CoordinatedRanks):
                each.renew(seconds)

    def close(self) -> None:
        """Ends the thread; another process that waits for an answer has None."""
        with suppress(jax.errors.JaxRuntimeError):  # it has answered, or process 0 has ended
            key = self._key("answer", self._ranks.rank)
            self._client.key_value_set_bytes(key, pickle.dumps(None))
        self._end()

    # -- within ---------------------------------------------------------------------------------

    def _key(self, what: str, rank: int) -> str:
        return f"{self._name}/{what}/{rank}"

    def _of_all(self, what: str, seconds: float) -> list[Any]:
        """What every process has set under this key by then; None for those that have not."""
        until = time.monotonic() + seconds
        found = [self._get(self._key(what, rank), until) for rank in range(self._ranks.world)]
        return [None if data is None else pickle.loads(data) for data in found]

    def _get(self, key: str, until: float) -> bytes | None:
        left = max(10, round(1000 * (until - time.monotonic())))
        try:
            return self._client.blocking_key_value_get_bytes(key, left)
        except jax.errors.JaxRuntimeError:  # a time-out, or process 0 has ended
            return None

    def _look(self) -> None:
        """Shuts down this process's connections to those that have left since the last look."""
        for key, theirs in self._client.key_value_dir_get_bytes(f"{self._name}/left/"):
            if key in self._seen:
                continue
            self._seen.add(key)
            own = tcp_connections.connections()
            tcp_connections.shut_down(
                tcp_connections.between(own, pickle.loads(theirs), but=_port_of_service())
            )


def possible() -> bool:
    """Whether a collective can be ended from outside: gloo on CPUs, and Linux."""
    over_gloo = getattr(jax.config, "jax_cpu_collectives_implementation", None) == "gloo"
    return jax.default_backend() == "cpu" and over_gloo and bool(tcp_connections.connections())


def _port_of_service() -> int:
    from jax._src import distributed  # as `coordination_client`

    address = distributed.global_state.coordinator_address or ":0"
    return int(address.rsplit(":", 1)[1])


def _watch(look: Any, stop: threading.Event) -> None:
    while not stop.wait(_LOOKS_EVERY_S):
        method = look()
        if method is None:
            return
        with suppress(jax.errors.JaxRuntimeError):  # the service is slow, or has ended
            method()


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(_ENDS_WITHIN_S)
