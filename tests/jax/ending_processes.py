"""A run of two processes that ends in every way, and is started again each time.

    python -m tests.jax.ending_processes ROOT FAULT...

JAX is imported once, and every start forks the two. A start resumes where the one before has ended,
until its fault happens to one of its processes. Prints a JSON pair for each: the fault, and what
both have seen.
"""

# optax types arrays as a union of many kinds.
# pyright: reportArgumentType=false

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import healcore
from healcore.jax.opt_state import without_heal_state
from healcore.jax.store import OrbaxStore  # noqa: F401  (imported once, before the forks)
from tests.jax import trained_together
from tests.jax.processes import free_port, join
from tests.jax.two_processes import GOES_BACK, compiled, everywhere, initial, mesh, rows_of

BOUND = 120.0
"""Seconds after which a process that waits shows where, and ends."""
SHUTDOWN_S = 5
"""For which JAX waits, at the end of a process, for the others; by default 300."""
REGULAR, LENGTH = 4, 40
"""Steps between two saves, and of the whole run."""
FAULTS = {"loss": 7, "both": 13, "killed": 17, "memory": 23, "loader": 27, "signal": 31, "none": 0}
"""Batch at which it happens to process 1; "memory" to process 0, "both" to both. In this order."""


def one_process(process: int, fault: str, port: str, root: Path) -> dict[str, Any]:
    faulthandler.dump_traceback_later(BOUND, exit=True)
    join(process, 2, port, shutdown_timeout_seconds=SHUTDOWN_S)
    hit = fault == "both" or process == {"memory": 0, "none": -1}.get(fault, 1)
    outcome: dict[str, Any] = {}

    def loader() -> Iterator[int]:
        for number in range(LENGTH):
            if hit and (fault, number) == ("loader", FAULTS["loader"]):
                raise LookupError(f"batch {number} cannot be read")
            yield number

    began = time.monotonic()
    try:
        train(hit, fault, root, loader, outcome)
    except BaseException as error:
        traceback.print_exc()
        outcome["raised"] = [type(error).__name__, str(error)[:200]]
        outcome["code"] = error.code if isinstance(error, SystemExit) else 1
    outcome["took"] = time.monotonic() - began
    if fault == "none":
        alone: dict[str, Any] = {}
        train(False, fault, None, loader, alone)
        outcome["undisturbed"] = alone["state"]
    if fault != "killed":
        jax.distributed.shutdown()  # as at the end of a program: waits for the other
    return outcome


class Rows:
    """The batches by their numbers, which can go on at any of them."""

    def __init__(self, make: Any) -> None:
        self._make, self._next = make, 0

    def __iter__(self) -> Iterator[int]:
        for number in self._make():
            if number >= self._next:
                self._next = number + 1
                yield number
        self._next = 0

    def __len__(self) -> int:
        return LENGTH

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


def train(hit: bool, fault: str, root: Path | None, loader: Any, outcome: dict[str, Any]) -> None:
    tx, step, _ = compiled()
    params = everywhere(initial())
    params = {name: each.astype(jnp.float32) for name, each in params.items()}
    state = {"params": params, "opt_state": tx.init(params), "step": everywhere(jnp.zeros((), int))}
    healer: Any = healcore.Healer(GOES_BACK, state=state, store=root, save_every=REGULAR)
    with healer:
        outcome["resumed"] = healer.step
        for number in healer.batches(Rows(loader)):
            if hit and number == FAULTS[fault]:
                happen(fault)
            if fault == "signal" and number >= FAULTS[fault]:
                time.sleep(0.5)  # a thread looks twice a second whether the processes vote
            healer.update(step(healer.state, rows_of(number)))
    outcome["step"] = healer.step
    whole = trained_together.whole(mesh(), without_heal_state(healer.state))
    outcome["state"] = trained_together.digest(whole)


def happen(fault: str) -> None:
    if fault in ("loss", "both"):
        raise ValueError("a wrong batch")
    if fault == "memory":
        jnp.ones(2**44)  # 64 TiB
    if fault == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


def start(fault: str, root: Path) -> dict[str, Any]:
    """Runs both processes to their end; what each has seen, and their statuses."""
    port, children = free_port(), {}
    sys.stdout.flush()
    for process in (0, 1):
        pid = os.fork()
        if pid:
            children[pid] = process
            continue
        log = os.open(root / f"{fault}.{process}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = 1
        try:
            outcome = one_process(process, fault, port, root / "run")
            (root / f"{fault}.{process}.json").write_text(json.dumps(outcome))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    statuses = [0, 0]
    for pid, process in children.items():
        statuses[process] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    files = [root / f"{fault}.{process}.json" for process in (0, 1)]
    seen = [json.loads(each.read_text()) if each.exists() else None for each in files]
    return {"statuses": statuses, "seen": seen}


def main(root: Path, faults: list[str]) -> None:
    for fault in faults:
        print(json.dumps([fault, start(fault, root)]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
