"""One of two processes that save together; one of them may kill itself.

    python -m tests.jax.killed_processes PROCESS PORT ROOT [KILLED SAVE DELAY]

Every value in a checkpoint is its step, so that each start can see whether all that is listed is
whole and of one step. Process KILLED kills itself in save SAVE of its start, from 1, at DELAY: a
share of the time of the save before, from when the save has its temporary directory. The last line
is "killed" or "whole".
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from healcore.jax.store import OrbaxStore
from healcore.runtime.store.manifest import sweep
from tests.jax.processes import join

HEARTBEATS_S = 10
"""Without one for that long a process counts as dead, and JAX ends the others."""
SECONDS = 60
"""After which a process that is left alone has to have ended."""
SAVES = 4
"""Of one start."""


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


def one_process(process: int, port: str, root: Path, killed: int, save: int, delay: float) -> None:
    faulthandler.dump_traceback_later(2 * SECONDS, exit=True)
    join(process, 2, port, heartbeat_timeout_seconds=HEARTBEATS_S)
    mesh = jax.make_mesh((2,), ("data",))
    if process == 0:
        sweep(root)  # as the next Healer does
    store = OrbaxStore(root)
    assert store.damaged() == [], store.damaged()
    found = [each.step for each in store.checkpoints()]
    for step in found:
        store.verify(step)
        restored = store.restore(step, {"run": state_of(0, mesh)}).state["run"]
        assert values_in(restored) == {float(step)}, (step, values_in(restored))
    for step in found[:-3]:
        store.delete(step)
    first = max(found, default=0) + 1
    lasted = 0.0
    for number in range(SAVES if killed < 0 else 100 * SAVES):  # until the kill
        if (process, number) == (killed, save):
            threading.Thread(target=kill, args=(root, delay * lasted), daemon=True).start()
        began = time.monotonic()
        store.save(first + number, {"run": state_of(first + number, mesh)})
        store.wait()
        lasted = time.monotonic() - began
    assert killed < 0, "the kill came too late"
    assert store.checkpoints()[-1].step == first + SAVES - 1
    assert store.damaged() == []
    assert not list(root.glob(".tmp*"))
    jax.distributed.shutdown()  # the other one may still be reading, and needs process 0


def kill(root: Path, delay: float) -> None:
    while not list(root.glob(".tmp*")):
        time.sleep(0.001)
    time.sleep(delay)
    print("killed", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _, number, service, folder, *aim = sys.argv
    victim, save, delay = aim or (-1, 0, 0)
    one_process(int(number), service, Path(folder), int(victim), int(save), float(delay))
    print("whole")
