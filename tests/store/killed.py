"""A program that saves, marks and deletes in a loop, killed at random moments, many times.

    python killed.py WORLD ROOT ROUNDS SECONDS

It imports the framework once and forks a child for every round. A child starts as a run would after
a crash: it opens the store, verifies and restores everything that is listed, and goes on. It prints
one JSON line with what was counted, or dies of the first thing that is not as it must be.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
import torch

from healcore.runtime.store import Keep, prune
from tests.store import worlds

STATES = {"dcp": worlds.DCP, "orbax": worlds.ORBAX, "torch-tiers": worlds.TORCH_TIERS}
KEEP = Keep(good=2, candidates=2, quarantined=1)


def state(world: worlds.World, step: int) -> dict[str, Any]:
    """A small state that only depends on the step. Nothing is compiled for it."""
    random = np.random.default_rng(step)
    arrays = [random.standard_normal((20, size), dtype=np.float32) for size in (1, 30, 400)]
    put = jax.device_put if world is worlds.ORBAX else torch.from_numpy
    return {"weights": [put(each) for each in arrays], "step": {"is": step}}


def child(world: worlds.World, root: Path, pipe: int) -> NoReturn:
    """One life: check what is there, tell so, save until killed."""
    store = world.make(root)
    saves = store.steps()
    for saved in saves:
        store.verify(saved.step)
    good = [saved.step for saved in saves if saved.status == "good"]
    assert good, "there must always be a known-good one"
    restored = store.restore(good[-1], state(world, 0))
    assert worlds.same_states(state(world, good[-1]), restored.state)
    assert restored.healing == {"step": good[-1]}
    assert store.problems() == [], store.problems()
    tell(pipe, "r", saves[-1].step)
    step = saves[-1].step
    while True:
        step += 1
        store.save(step, state(world, step), healing={"step": step})
        if step % 3 == 0:
            continue  # the next save waits for this one
        store.wait()
        tell(pipe, "s", step)
        if step % 2 == 0:
            store.mark(step, "good")
            prune(store, KEEP)


def tell(pipe: int, what: str, step: int) -> None:
    os.write(pipe, struct.pack("<cq", what.encode(), step))


def main() -> None:
    name, root, rounds, seconds = sys.argv[1:]
    world, rng = STATES[name], random.Random(name)
    counts = {"rounds": 0, "saves": 0, "leavings": 0, "last": 0}
    root_path = Path(root)
    first = os.fork()
    if not first:
        store = world.make(root_path)
        store.save(0, state(world, 0), healing={"step": 0})
        store.wait()
        store.mark(0, "good")
        os._exit(0)
    assert os.waitpid(first, 0)[1] == 0
    for _ in range(int(rounds)):
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reader)
            try:
                child(world, root_path, writer)
            finally:
                os._exit(3)  # only an error ends a child
        os.close(writer)
        # Not before it has looked at what the one before left behind.
        assert select.select([reader], [], [], 60)[0], "a child does not get ready"
        ready = os.read(reader, 9)
        if ready:
            time.sleep(rng.random() * float(seconds))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), "a child found something that is not as it must be"
        _, started = struct.unpack("<cq", ready)
        assert started >= counts["last"], f"step {counts['last']} was saved and is gone"
        told = b""
        while data := os.read(reader, 1 << 16):
            told += data
        os.close(reader)
        done = [step for _, step in struct.iter_unpack("<cq", told)]
        counts["last"] = max([started, *done])
        counts["saves"] += len(done)
        counts["rounds"] += 1
        counts["leavings"] += any(each.startswith(".tmp-") for each in os.listdir(root_path))
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
