"""Healed runs that hang, or only take long: python -m ... HOW FOLDER, or all ROOT RUNS.

With several ranks only rank 1 hangs, and the others wait for it in an all_reduce.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from healcore.runtime.healer import Healer

HANGS_AT = 5
LIMIT = 1.0
"""Seconds that a step may take."""
HEALTHY = 4.0
"""The same in a healthy run, whose steps a busy machine may delay."""


def hang(how: str, folder: str) -> None:
    """Never returns, unless it is only slow."""
    if how == "gil":  # waits for a mutex that it holds itself
        mutex = ctypes.create_string_buffer(64)
        lock = ctypes.PyDLL(None).pthread_mutex_lock
        lock(mutex)
        lock(mutex)
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)  # the guard continues it for its stacks: it must not be elsewhere by then
    elif how == "slow":
        while '"fault"' not in (Path(folder) / "healcore.events.jsonl").read_text():
            time.sleep(0.05)
    elif how in ("sleeps", "killed"):
        time.sleep(1000)
    while how == "python":
        pass


def evaluate() -> None:
    """Takes long, as an evaluation or a checkpoint does."""
    time.sleep(1.5 * HEALTHY)


def main(how: str, folder: str, rank: int, world: int) -> None:
    """Trains 10 steps; at step HANGS_AT it does what `how` says."""
    faulthandler.dump_traceback_later(300, exit=True)
    options: dict[str, Any] = {"hang": {"confirm": world > 1}}
    options["hang"] |= {"probe_every_s": 0.1, "probe_s": 0.5}
    limits = {"healthy": HEALTHY, "killed": 100.0}
    options["hang"]["timeout_s"] = limits.get(how, LIMIT)
    if how == "slow":
        options["mode"] = "observe"
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}.rendezvous", rank=rank,
                                world_size=world)  # fmt: skip
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    with Healer("default", state=state, store=folder, **options) as healer:
        for number in healer.batches(range(10)):
            time.sleep(0.05)
            if number == 0 and how == "healthy":
                evaluate()  # the first step, which compiles
            if number == HANGS_AT and (world == 1 or rank == 1):
                hang(how, folder)
            loss = model(torch.ones(1, 2)).square().mean()
            healer.observe(loss)
            loss.backward()
            for p in model.parameters():
                if world > 1:
                    dist.all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()
            if number == HANGS_AT and how == "healthy":
                evaluate()
    print("completed")


def forked(how: str, folder: Path, rank: int, world: int) -> int:
    """Starts the same in a forked process, which saves it the import of torch; its number."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        log = os.open(f"{folder}.{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        main(how, str(folder), rank, world)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def all_of(root: Path, runs: list[tuple[str, int]]) -> None:
    """Runs (how, ranks) at once, in folders of `root`: prints pids, then exit statuses."""
    pids = {}
    for how, world in runs:
        (folder := root / f"{how}{world}").mkdir()
        for rank in range(world):
            pids[f"{how}{world}.{rank}"] = forked(how, folder, rank, world)
    print(json.dumps(pids), flush=True)
    for name, pid in pids.items():
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps([name, status]), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "all":
        all_of(Path(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        main(sys.argv[1], sys.argv[2], 0, 1)
