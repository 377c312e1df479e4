"""`StoreRendezvous`: ranks that end at different moments find each other.

A rank whose loop raises leaves the others in a collective of the user's, which gloo ends only at
its time-out or when a connection breaks. gloo has no abort. So this rank shuts down its own end of
the connections to the other ranks: their collective raises at once, as if this process had died,
and each of them comes to the end of its `with` block. There they meet in the store that
torch.distributed was started with, which needs no collective.
"""

from __future__ import annotations

import pickle
import threading
import time
import uuid
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch.distributed as dist

from healcore.runtime import tcp_connections
from healcore.runtime.store.ranks import Ranks
from healcore.torch.store.gloo import GlooRanks

_READ_S = 5.0
"""Seconds for which rank 0, whose process may hold the store, waits until the others have read."""
_LOOK_S = (0.005, 0.1)
"""Seconds between two looks at the store, at first and at most. A wait within the store would hold
up all its other uses in this process."""
_BEAT_S = 0.5
"""Seconds between the heartbeats of a rank that has posted ..."""
_SILENT_S = 10.0
"""... and without one, until the others take it for killed."""
_COLLECTIVES = ("distributed_c10d.py", "nn/parallel/distributed.py", "torch/autograd/graph.py")
"""Files of torch with the innermost frame of a rank that waits for another one."""


class StoreRendezvous:
    """Implements `healcore.runtime.driver.Rendezvous` for ranks that exchange over gloo.

    Every rank of `ranks` makes it at the same place of the program. Connections of groups that are
    made later are not known: ranks that wait in those leave when this process ends.
    """

    def __init__(self, ranks: GlooRanks) -> None:
        self._ranks = ranks
        self.world = ranks.world
        self._store: Any = dist.distributed_c10d._get_default_store()
        own = tcp_connections.connections()
        of_ranks = ranks.gather((uuid.uuid4().hex, [*own.values()]))
        self._name = f"healcore/{of_ranks[0][0]}"
        self._of_rank = {
            rank: tcp_connections.between(own, ends, but=self._port())
            for rank, (_, ends) in enumerate(of_ranks)
            if rank != ranks.rank
        }
        self._to_others = {each: end for of in self._of_rank.values() for each, end in of.items()}
        self._closed = threading.Event()
        self.possible = bool(self._to_others)
        """False: the connections are not known (not Linux, or addresses are translated)."""

    def put(self, what: str, item: Any) -> None:
        """Leaves an item for the others."""
        self._store.set(f"{self._name}/last/{what}", pickle.dumps(item))
        self._store.add(f"{self._name}/count/{what}", 1)

    def last(self, what: str) -> Any | None:
        """The last item of any rank."""
        key = f"{self._name}/last/{what}"
        return pickle.loads(self._store.get(key)) if self._store.check([key]) else None

    def count(self, what: str) -> int:
        """How many there were."""
        return self._store.add(f"{self._name}/count/{what}", 0)

    def connected(self) -> bool:
        """Whether each other rank has a connection left of those that it had at the start.

        Some may have been closed since, such as those of a group that the program has destroyed.
        """
        now = tcp_connections.connections()
        return all(
            not known or any(now.get(each) == end for each, end in known.items())
            for known in self._of_rank.values()
        )

    def in_collective(self, frame: FrameType) -> bool:
        """Whether it is of a collective, or of a backward pass, in which DDP has some."""
        return frame.f_code.co_filename.endswith(_COLLECTIVES)

    def post(self, item: Any) -> None:
        """Leaves this rank's item for the others; numbered in the order of all ranks' calls."""
        number = self._store.add(f"{self._name}/posts", 1)
        self._store.set(self._key("item", self._ranks.rank), pickle.dumps((number, item)))
        self._store.set(f"{self._name}/posted", "1")
        threading.Thread(target=self._beat, name="healcore-end-beat", daemon=True).start()

    def posted(self) -> bool:
        """Whether any rank has posted."""
        try:
            return self._store.check([f"{self._name}/posted"])
        except RuntimeError:
            return True  # the process that held the store has ended

    def lost_peer(self, error: BaseException | None) -> bool:
        """Whether gloo has raised because a connection has broken."""
        return tcp_connections.has_broken(error)

    def interrupt_others(self) -> None:
        """Ends the collectives in which other ranks wait for this one: they raise."""
        tcp_connections.shut_down(self._to_others)
        self._to_others = {}

    def collect(self, seconds: float) -> list[tuple[int, Any] | None]:
        """Number and item of every rank; None for those that have not come within this time."""
        return self._of_all("item", seconds)

    def leave(self, ranks: Sequence[Ranks]) -> None:
        """Closes these, and this rank's end of all connections to other ranks."""
        for each in ranks:
            if isinstance(each, GlooRanks):
                each.leave()
        self.interrupt_others()

    def answers(self, mine: Any, seconds: float) -> list[Any]:
        """Every rank's answer; None for those that have not come within this time, or have gone."""
        self._store.set(self._key("answer", self._ranks.rank), pickle.dumps(mine))
        return self._of_all("answer", seconds)

    def renew(self, ranks: Sequence[Ranks], seconds: float) -> None:
        """New groups for these `ranks`, whose exchanges raise after `seconds`. Collective."""
        for each in ranks:
            if isinstance(each, GlooRanks):
                each.renew(seconds)

    def close(self) -> None:
        """Lets the others see that this rank has gone."""
        self._closed.set()
        self._store.set(self._key("gone", self._ranks.rank), "1")

    # -- within ---------------------------------------------------------------------------------

    def _key(self, what: str, rank: int) -> str:
        return f"{self._name}/{what}/{rank}"

    def _of_all(self, what: str, seconds: float) -> list[Any]:
        """What every rank has set under this key; None for those that have not, or have gone."""
        until = time.monotonic() + seconds
        found = [self._get(what, rank, until) for rank in range(self._ranks.world)]
        if None not in found:
            self._wait_for_readers(f"{what} read")
        return [None if each is None else pickle.loads(each) for each in found]

    def _get(self, what: str, rank: int, until: float) -> bytes | None:
        """What a rank has set, by then; None: it has not, or this rank cannot see it any more."""
        key, pause = self._key(what, rank), _LOOK_S[0]
        beat, changed = 0, time.monotonic()
        try:
            while not self._store.check([key]):
                now = time.monotonic()
                number = self._beats(rank)
                if number != beat:
                    beat, changed = number, now
                gone = number and (now - changed > _SILENT_S)
                if now >= until or gone or self._store.check([self._key("gone", rank)]):
                    return None
                time.sleep(min(pause, until - now))
                pause = min(2 * pause, _LOOK_S[1])
            return self._store.get(key)
        except RuntimeError:  # the process that held the store has ended
            return None

    def _beats(self, rank: int) -> int:
        """Heartbeats of a rank since it has posted; 0: it has not posted."""
        key = self._key("beats", rank)
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _beat(self) -> None:
        """Counts heartbeats in the store until this rank has gone, in a thread."""
        number = 0
        try:
            while not self._closed.is_set():
                number += 1
                self._store.set(self._key("beats", self._ranks.rank), str(number))
                self._closed.wait(_BEAT_S)
        except RuntimeError:
            return

    def _wait_for_readers(self, what: str) -> None:
        """Rank 0, whose process may hold the store, waits until the others have read."""
        try:
            self._store.set(self._key(what, self._ranks.rank), pickle.dumps(True))
        except RuntimeError:
            return
        if self._ranks.rank == 0:
            until = time.monotonic() + _READ_S
            for rank in range(self._ranks.world):
                self._get(what, rank, until)

    def _port(self) -> int:
        """Of the TCPStore, whose connections stay; 0 if the store is another one."""
        store = self._store
        while hasattr(store, "underlying_store"):  # of a PrefixStore
            store = store.underlying_store
        return getattr(store, "port", 0)
