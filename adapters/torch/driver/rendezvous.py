"""`StoreRendezvous`: ranks that end at different moments find each other.

A rank whose loop raises leaves the others in a collective of the user's, which gloo ends only at
its time-out or when a connection breaks. gloo has no abort. So this rank shuts down its own end of
the connections to the other ranks: their collective raises at once, as if this process had died,
and each of them comes to the end of its `with` block. There they meet in the store that
torch.distributed was started with, which needs no collective.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from healcore.runtime.store.ranks import Ranks
from healcore.torch.store.gloo import GlooRanks

_ESTABLISHED = "01"
_BROKEN = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""What gloo and the system say then, in a RuntimeError that nothing else distinguishes."""
_LINGER_S = 5.0
"""Seconds for which rank 0, whose process may hold the store, waits until the others have read."""


class Connection(NamedTuple):
    """One end of a TCP connection, as /proc/net/tcp writes the addresses."""

    here: str
    there: str


class StoreRendezvous:
    """Implements `healcore.runtime.driver.Rendezvous` for ranks that exchange over gloo.

    Every rank of `ranks` makes it at the same place of the program. Connections of groups that are
    made later are not known: ranks that wait in those leave when this process ends.
    """

    def __init__(self, ranks: GlooRanks) -> None:
        self._ranks = ranks
        self._store: Any = dist.distributed_c10d._get_default_store()
        own = connections()
        of_ranks = ranks.gather((uuid.uuid4().hex, [*own.values()]))
        self._name = f"healcore/{of_ranks[0][0]}"
        of_others = [each for rank, (_, ends) in enumerate(of_ranks) if rank != ranks.rank
                     for each in ends]  # fmt: skip
        theirs = {(each[1], each[0]) for each in of_others}
        keep = f":{self._port():04X}"
        self._to_others = {
            socket_: end
            for socket_, end in own.items()
            if end in theirs and not end.here.endswith(keep) and not end.there.endswith(keep)
        }
        self.possible = bool(self._to_others)
        """False: the connections are not known (not Linux, or addresses are translated)."""

    def post(self, item: Any) -> None:
        """Leaves this rank's item for the others; numbered in the order of all ranks' calls."""
        number = self._store.add(f"{self._name}/posts", 1)
        self._store.set(self._key("item", self._ranks.rank), pickle.dumps((number, item)))
        self._store.set(f"{self._name}/posted", "1")

    def posted(self) -> bool:
        """Whether any rank has posted."""
        try:
            return self._store.check([f"{self._name}/posted"])
        except RuntimeError:
            return True  # the process that held the store has ended

    def lost_peer(self, error: BaseException | None) -> bool:
        """Whether gloo has raised because a connection has broken."""
        return isinstance(error, RuntimeError) and any(each in str(error) for each in _BROKEN)

    def interrupt_others(self) -> None:
        """Ends the collectives in which other ranks wait for this one: they raise."""
        now = connections()
        for each, end in self._to_others.items():
            if now.get(each) != end:
                continue  # closed since; its number may be another file's
            try:
                with socket.socket(fileno=os.dup(each[0])) as own:
                    own.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # the other end was faster
        self._to_others = {}

    def collect(self, seconds: float) -> list[tuple[int, Any] | None]:
        """Number and item of every rank; None for those that have not come within this time."""
        until = time.monotonic() + seconds
        found = []
        for rank in range(self._ranks.world):
            data = self._get(self._key("item", rank), until)
            found.append(None if data is None else pickle.loads(data))
        if None not in found:
            self._linger("read")
        return found

    def all_ready(self, seconds: float) -> bool:
        """Whether every rank calls this within this time."""
        self._store.set(self._key("ready", self._ranks.rank), "1")
        until = time.monotonic() + seconds
        keys = [self._key("ready", rank) for rank in range(self._ranks.world)]
        ready = all(self._get(key, until) is not None for key in keys)
        if ready:
            self._linger("ready read")
        return ready

    def renew(self, ranks: Sequence[Ranks], seconds: float) -> None:
        """New groups for these `ranks`, whose exchanges raise after `seconds`. Collective."""
        for each in ranks:
            if isinstance(each, GlooRanks):
                each.renew(seconds)

    # -- within ---------------------------------------------------------------------------------

    def _key(self, what: str, rank: int) -> str:
        return f"{self._name}/{what}/{rank}"

    def _get(self, key: str, until: float) -> bytes | None:
        left = timedelta(seconds=max(0.01, until - time.monotonic()))
        try:
            self._store.wait([key], left)
            return self._store.get(key)
        except RuntimeError:  # a time-out, or the process that held the store has ended
            return None

    def _linger(self, what: str) -> None:
        try:
            self._store.set(self._key(what, self._ranks.rank), "1")
        except RuntimeError:
            return
        if self._ranks.rank == 0:
            until = time.monotonic() + _LINGER_S
            for rank in range(self._ranks.world):
                self._get(self._key(what, rank), until)

    def _port(self) -> int:
        """Of the TCPStore, whose connections stay; 0 if the store is another one."""
        store = self._store
        while hasattr(store, "underlying_store"):  # of a PrefixStore
            store = store.underlying_store
        return getattr(store, "port", 0)


def connections() -> Mapping[tuple[int, str], Connection]:
    """The TCP connections of this process, by file descriptor and inode; empty without /proc."""
    inodes = {}
    try:
        for name in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{name}")
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes[target[len("socket:[") : -1]] = int(name)
        lines = [
            line.split()
            for table in ("tcp", "tcp6")
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
        ]
    except OSError:
        return {}
    return {
        (inodes[fields[9]], fields[9]): Connection(fields[1], fields[2])
        for fields in lines
        if fields[3] == _ESTABLISHED and fields[9] in inodes
    }
