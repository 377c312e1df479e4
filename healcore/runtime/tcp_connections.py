"""The TCP connections of this process, and how to end them from outside.

gloo has no abort. A rank that waits in one of its collectives raises at once when a connection to
another rank breaks.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

_ESTABLISHED = "01"
_BROKEN = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""What gloo and the system say then, in errors that nothing else distinguishes."""

Socket = tuple[int, str]
"""File descriptor and inode: the descriptor may be another file's later."""


class Connection(NamedTuple):
    """One end of a TCP connection, as /proc/net/tcp writes the addresses."""

    here: str
    there: str

    def has_port(self, port: int) -> bool:
        """Whether either end has this port."""
        return any(address.endswith(f":{port:04X}") for address in self)


def connections() -> Mapping[Socket, Connection]:
    """The connections of this process; empty without /proc."""
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


def has_broken(error: BaseException | None) -> bool:
    """Whether gloo has raised this because a connection has broken (a ValueError in JAX)."""
    if not isinstance(error, RuntimeError | ValueError):
        return False
    return any(each in str(error) for each in _BROKEN)


def between(
    own: Mapping[Socket, Connection], theirs: Iterable[Connection], *, but: int
) -> dict[Socket, Connection]:
    """Those of `own` whose other end is among `theirs`, except through the port `but`."""
    ends = {(each[1], each[0]) for each in theirs}
    return {each: end for each, end in own.items() if end in ends and not end.has_port(but)}


def shut_down(chosen: Mapping[Socket, Connection]) -> None:
    """Ends these connections: what waits at either end raises."""
    now = connections()
    for each, end in chosen.items():
        if now.get(each) != end:
            continue  # closed since; its number may be another file's
        try:
            with socket.socket(fileno=os.dup(each[0])) as own:
                own.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # the other end was faster
