"""Two hosts whose link is cut in the middle of a save and of a rollback.

    python -m tests.healer.cut_link ROOT

A host is a network namespace with its own address and one rank; a pair of virtual network devices
is the link. Needs root. Prints a JSON line with what was found; ends with an error at the first
thing that is not as it must be.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from healcore.torch.store import gloo
from tests.healer import elastic_rank
from tests.healer.elastic_rank import BACK, STEP, WRITE, die
from tests.healer.elastic_runs import Kind, facts_of, run_ranks, steps_of

SHORT, LONG = 6, 60
"""Time-outs of every exchange in seconds: of starts that have to end with one, and of the last
start, which has to complete on a busy machine too."""
PAUSE = 1.5
"""Seconds for which the link is down when it is only slow: TCP sends again what was lost."""
NETWORK = "10.231.7"
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


def host(rank: int) -> str:
    """The namespace of a rank."""
    return f"healcore-{os.environ['LINK']}-{rank}"


def ip(*arguments: object) -> None:
    """Runs iproute2's ip."""
    subprocess.run(["ip", *map(str, arguments)], check=True, capture_output=True, text=True)


@contextmanager
def two_hosts() -> Iterator[None]:
    """Makes both namespaces, and the link between them."""
    os.environ["LINK"] = str(os.getpid())
    try:
        for rank in (0, 1):
            ip("netns", "add", host(rank))
        ip(
            "link",
            "add",
            "link0",
            "netns",
            host(0),
            "type",
            "veth",
            "peer",
            "name",
            "link1",
            "netns",
            host(1),
        )
        for rank in (0, 1):
            ip("-n", host(rank), "addr", "add", f"{NETWORK}.{rank + 1}/30", "dev", f"link{rank}")
            ip("-n", host(rank), "link", "set", "lo", "up")
            ip("-n", host(rank), "link", "set", f"link{rank}", "up")
        yield
    finally:
        for rank in (0, 1):
            subprocess.run(["ip", "netns", "del", host(rank)], check=False, capture_output=True)


def enter(rank: int, exchange: int) -> None:
    """Moves this process to the host of its rank, and sets the time-out of healcore."""
    with open(f"/var/run/netns/{host(rank)}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = f"link{rank}"
    gloo.MIN_TIMEOUT = timedelta(seconds=exchange)


def cut() -> None:
    """Takes the link down."""
    ip("-n", host(0), "link", "set", "link0", "down")


def mend() -> None:
    """Brings the link up."""
    ip("-n", host(0), "link", "set", "link0", "up")


def interrupt() -> None:
    """Takes the link down for a moment."""
    cut()
    time.sleep(PAUSE)
    mend()


# Rank 0 holds the store of the rendezvous: the other one cannot reach it once it is killed.
STARTS: list[dict[tuple[str, int], tuple[float, Callable[[], None]]]] = [
    {(WRITE, 2): (0.0, interrupt), (BACK, 1): (0.005, cut)},
    {(WRITE, 2): (0.005, cut)},
    {(STEP, 3): (0.0, die)},
    {(BACK, 1): (0.005, interrupt), (WRITE, 4): (0.0, interrupt)},
]
"""What rank 0 does to the link, or to itself, in each start. The last one completes."""


def main(root: Path) -> None:
    """All starts of one run."""
    for name in ("torch._dynamo", "healcore.torch.driver"):
        importlib.import_module(name)  # the first step would, in every rank
    found: dict[str, Any] = {"statuses": [], "seconds": []}
    clean, here = Kind("DDP", root), root / "cut"
    with two_hosts():
        for number, actions in enumerate(STARTS):

            def target(number: int = number, actions: Any = actions) -> None:
                mine = actions if dist.get_rank() == 0 else {}
                elastic_rank.start("DDP", here, number, mine)

            exchange = LONG if number == len(STARTS) - 1 else SHORT
            began = time.monotonic()
            ended = run_ranks(
                here,
                2,
                target,
                seconds=exchange,
                rendezvous=f"tcp://{NETWORK}.1:{29500 + number}",
                enter=partial(enter, exchange=exchange),
            )
            found["statuses"].append(ended.statuses)
            found["seconds"].append(round(time.monotonic() - began, 1))
            mend()
    assert ended.statuses == [0, 0], ended
    assert facts_of(here) == clean.facts, (facts_of(here), clean.facts)
    for at, state in steps_of(here).items():
        assert clean.steps.get(at) == state, (at, state)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
