"""Healed runs that hang, or only take long: python -m tests.runtime.hanging_run ROOT RUNS.

With several ranks only rank 1 hangs, and the others wait for it in an all_reduce.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from healcore.runtime import hang_guard
from healcore.runtime.healer import Healer
from tests.healer.killed_run_checks import forked
from tests.healer.run_options import grouped

HANGS_AT = 5
LIMIT = 1.0
"""Seconds that a step may take."""
HEALTHY = 4.0
"""The same in a healthy run, whose steps a busy machine may delay."""
OPTIONS: dict[str, dict[str, Any]] = {"slow": {"mode": "observe"}, "preset": {}}
"""What differs from a policy that ends a process that hangs."""
ENDS = {"respond": [{"to": ["hang"], "do": ["stop"]}]}


def reported(folder: str) -> bool:
    """Whether the guard has written its event."""
    return '"fault"' in (Path(folder) / "healcore.events.jsonl").read_text()


def hang(how: str, folder: str) -> None:
    """Never returns, unless it is only slow."""
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how in ("slow", "preset"):
        while not reported(folder):
            time.sleep(0.05)
    elif how == "sleeps":
        time.sleep(1000)
    while how == "python":
        pass


def evaluate() -> None:
    """Takes long, as an evaluation or a checkpoint does."""
    time.sleep(1.5 * HEALTHY)


def main(how: str, folder: str, rank: int, world: int) -> None:
    """Trains 10 steps; at step HANGS_AT it does what `how` says."""
    faulthandler.dump_traceback_later(1000, exit=True)
    limit = HEALTHY if how == "healthy" else LIMIT
    options: dict[str, Any] = {"hang": {"timeout_s": limit}, **OPTIONS.get(how, ENDS)}
    if world > 1:
        hang_guard._STACKS_TIMEOUT_S, hang_guard._REPORT_TIMEOUT_S = 10.0, 600.0
        dist.init_process_group("gloo", init_method=f"file://{folder}.rendezvous", rank=rank,
                                world_size=world)  # fmt: skip
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    with Healer("default", state=state, store=folder, **grouped(options)) as healer:
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


def ends_of(pids: dict[str, int]) -> dict[str, int]:
    """The exit statuses; a stopped process is killed at the end, as a launcher does it."""
    statuses: dict[str, int] = {}
    while len(statuses) < len(pids):
        for name, pid in pids.items():
            found, status = (0, 0) if name in statuses else os.waitpid(pid, os.WNOHANG)
            if found:
                statuses[name] = os.waitstatus_to_exitcode(status)
        left = pids.keys() - statuses.keys()
        if left and all(name.startswith("stopped") for name in left):
            for name in left & {name for name in left if name.endswith(".1")}:
                if len(left) == 1:
                    os.kill(pids[name], signal.SIGKILL)
        time.sleep(0.05)
    return statuses


def all_of(root: Path, runs: list[tuple[str, int]]) -> None:
    """Runs (how, ranks) at once, in folders of `root`; prints exit statuses."""
    pids = {}
    for how, world in runs:
        (folder := root / f"{how}{world}").mkdir()
        for rank in range(world):
            target = partial(main, how, str(folder), rank, world)
            pids[f"{how}{world}.{rank}"] = forked(target, Path(f"{folder}.{rank}.log"))
    print(json.dumps(ends_of(pids)), flush=True)


if __name__ == "__main__":
    all_of(Path(sys.argv[1]), json.loads(sys.argv[2]))
