"""Two processes save together, and one of them kills itself.

    python -m tests.jax.killed_processes ROOT KILLS SEED


JAX is imported once, and every start forks the two. Every value in a checkpoint is its step, so
that each start can see whether all that is listed is whole and of one step. Prints a JSON line with
what was counted; ends with an error at the first thing that is not as it must be.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from healcore.jax.store import OrbaxStore
from healcore.runtime.store.manifest import sweep
from tests.jax.processes import free_port, join

HEARTBEATS_S = 10
"""Without one for that long a process counts as dead, and JAX ends the others."""
BOUND = 60.0
"""Seconds until a process that is left alone has to have ended."""
SAVES = 4
"""Of one start."""


class Aim(NamedTuple):
    """Which process kills itself, in which save of its start, and when in it."""

    process: int
    save: int
    """From 1: the save before it shows how long one takes."""
    delay: float
    """Share of that time, from when the save has its temporary directory."""


def state_of(step: int, mesh: Any) -> dict[str, Any]:
    """Arrays of both processes, copies of one array, and an array of each process alone."""

    def spread(shape: tuple[int, ...], spec: Any) -> jax.Array:
        part = np.full(shape, step, np.float32)
        return jax.make_array_from_callback(
            shape, NamedSharding(mesh, spec), lambda index: part[index]
        )

    return {
        "parts": spread((64, 256), P("data")),
        "copies": spread((1000,), P()),
        "own": jnp.full(10, step),
    }


def values_in(state: dict[str, Any]) -> set[float]:
    return {
        float(value)
        for leaf in state.values()
        for shard in leaf.addressable_shards
        for value in np.unique(np.asarray(shard.data))
    }


def one_process(process: int, port: str, root: Path, aim: Aim | None) -> int:
    """One start; the number of checkpoints that it found."""
    faulthandler.dump_traceback_later(BOUND, exit=True)
    join(process, 2, port, heartbeat_timeout_seconds=HEARTBEATS_S)
    mesh = jax.make_mesh((2,), ("data",))
    if process == 0:
        sweep(root)  # as the next Healer does
    store = OrbaxStore(root)
    assert store.damaged() == [], store.damaged()
    found = [each.step for each in store.steps()]
    for step in found:
        store.verify(step)
        restored = store.restore(step, {"run": state_of(0, mesh)}).state["run"]
        assert values_in(restored) == {float(step)}, (step, values_in(restored))
    for step in found[:-3]:
        store.delete(step)
    first, lasted = max(found, default=0) + 1, 0.0
    for number in range(SAVES if aim is None else 100 * SAVES):  # until the kill
        if aim is not None and (process, number) == (aim.process, aim.save):
            threading.Thread(target=kill, args=(root, aim.delay * lasted), daemon=True).start()
        began = time.monotonic()
        store.save(first + number, {"run": state_of(first + number, mesh)})
        store.wait()
        lasted = time.monotonic() - began
    assert aim is None, "the kill came too late"
    assert store.steps()[-1].step == first + SAVES - 1
    assert store.damaged() == []
    assert not list(root.glob(".tmp*"))
    jax.distributed.shutdown()  # the other one may still be reading, and needs process 0
    return len(found)


def kill(root: Path, delay: float) -> None:
    while not list(root.glob(".tmp*")):
        time.sleep(0.001)
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGKILL)


def start(root: Path, port: str, aim: Aim | None) -> tuple[list[int], float]:
    """The exit statuses, and the seconds that the other process has lived on."""
    children = {}
    for process in (0, 1):
        pid = os.fork()
        if pid:
            children[pid] = process
            continue
        status = 1
        try:
            one_process(process, port, root, aim)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)  # if one was killed, jax.distributed.shutdown would wait for it
    statuses, ended, until = [0, 0], [], time.monotonic() + 2 * BOUND
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            statuses[children.pop(pid)] = os.waitstatus_to_exitcode(status)
            ended.append(time.monotonic())
            until = time.monotonic() + BOUND
        elif time.monotonic() > until:
            for each in children:
                os.kill(each, signal.SIGKILL)
                os.waitpid(each, 0)
            raise AssertionError(f"processes {[*children.values()]} have not ended")
        else:
            time.sleep(0.01)
    return statuses, ended[1] - ended[0]


def main(root: Path, kills: int, seed: int) -> None:
    draw = random.Random(seed)
    lived, left = [], 0
    for number in range(kills):
        aim = Aim(number % 2, draw.randrange(1, SAVES), draw.random() / 2)
        statuses, seconds = start(root, free_port(), aim)
        assert statuses[aim.process] == -signal.SIGKILL, statuses
        assert statuses[1 - aim.process] != 0, statuses
        lived.append(round(seconds, 1))
        left += bool(list(root.glob(".tmp*")))
    statuses, _ = start(root, free_port(), None)
    assert statuses == [0, 0], statuses
    print(json.dumps({"kills": kills, "within a save": left, "lived on": lived}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
