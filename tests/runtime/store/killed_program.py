"""A program that saves, rolls back and deletes, killed at random moments, many times.

    python killed_program.py ROUNDS ROOT STORE…

It imports the frameworks once and forks a child for every round. A child starts as a run would
after a crash: it opens the store, verifies everything that is listed, restores the newest
known-good one, and goes on. It prints a JSON line per store with what was counted, or dies of the
first thing that is not as it must be.
"""

from __future__ import annotations

import itertools
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

from healcore.runtime.store import Keep
from tests.runtime.store import store_cases

STATES = {case.name: case for case in (*store_cases.DISKS, *store_cases.TIERS)}
KEEP = Keep(good=2, candidates=2)
LONGEST = {"dcp": 0.06, "torch-tiers": 0.06, "orbax": 0.2, "jax-tiers": 0.2}
"""Seconds until the latest kill: a few saves."""
READY, SAVED, BACK = "r", "s", "b"


def state(case: store_cases.StoreCase, step: int) -> dict[str, Any]:
    """A small state that only depends on the step. Nothing is compiled for it."""
    random = np.random.default_rng(step)
    arrays = [random.standard_normal((20, size), dtype=np.float32) for size in (1, 30, 400)]
    put = jax.device_put if case.in_jax else torch.from_numpy
    return {"weights": [put(each) for each in arrays], "step": {"is": step}}


def child(case: store_cases.StoreCase, root: Path, pipe: int) -> NoReturn:
    """Checks what is there, reports it, and saves until it is killed."""
    store = case.make(root)
    saves = [saved for saved in store.steps() if saved.status != "abandoned"]
    for saved in saves:
        store.verify(saved.step)
    good = [saved.step for saved in saves if saved.status == "good"]
    assert good, "there must always be a known-good one"
    restored = store.restore(good[-1], state(case, 0))
    assert store_cases.same_states(state(case, good[-1]), restored.state)
    assert restored.healing["step"] == good[-1]
    assert store.damaged() == [], store.damaged()
    report(pipe, READY, saves[-1].step)
    store_cases.prune(store, KEEP)  # most processes are killed before the one further down
    step = saves[-1].step
    attempts, proven = [*store.healings()[step]["attempts"], step], good[-1]
    for turn in itertools.count(1):
        step += 1
        healing = {"step": step, "attempts": attempts, "proven": proven}
        store.save(step, state(case, step), healing=healing)
        if step % 3 == 0:
            continue  # the next save waits for this one
        store.wait()
        report(pipe, SAVED, step)
        if step % 2 == 0:
            proven = step - 2
            store_cases.prune(store, KEEP)
        if turn % 4 == os.getpid() % 4:  # some processes are killed after one turn
            step = roll_back(case, store, attempts, pipe)
            proven = min(proven, step)
    raise AssertionError


def roll_back(case: store_cases.StoreCase, store: Any, attempts: list[int], pipe: int) -> int:
    """Goes back to the newest known-good one, and begins an attempt there."""
    target = max(saved.step for saved in store.steps() if saved.status == "good")
    store.restore(target, state(case, 0))
    report(pipe, BACK, target)
    attempts.append(target)
    store.commit(target, {"step": target, "attempts": attempts, "proven": target})
    return target


def report(pipe: int, what: str, step: int) -> None:
    os.write(pipe, struct.pack("<cq", what.encode(), step))


def kills(name: str, root: Path, rounds: int) -> dict[str, int]:
    """Kills one store's program again and again; what was counted."""
    case, rng = STATES[name], random.Random(name)
    counts = {"rounds": 0, "saves": 0, "rollbacks": 0, "stale": 0, "last": 0}
    first = os.fork()
    if not first:
        store = case.make(root)
        store.save(0, state(case, 0), healing={"step": 0, "attempts": [0], "proven": 0})
        store.wait()
        os._exit(0)
    assert os.waitpid(first, 0)[1] == 0
    # More of them where no kill has hit a save yet: how often one does depends on the machine.
    while counts["rounds"] < rounds or not (counts["stale"] or counts["rounds"] >= 20 * rounds):
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reader)
            try:
                child(case, root, writer)
            finally:
                os._exit(3)  # only an error ends a child
        os.close(writer)
        # Not before it has looked at what the one before left behind.
        assert select.select([reader], [], [], 60)[0], "a child does not get ready"
        ready = os.read(reader, 9)
        if ready:
            time.sleep(rng.random() * LONGEST[name])
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), "a child found something that is not as it must be"
        started = struct.unpack("<cq", ready)[1]
        assert started >= counts["last"], f"step {counts['last']} was saved and is gone"
        reported = b""
        while data := os.read(reader, 1 << 16):
            reported += data
        os.close(reader)
        counts["last"] = started
        for what, step in struct.iter_unpack("<cq", reported):
            back = what.decode() == BACK
            counts["last"] = step if back else max(counts["last"], step)
            counts["rollbacks" if back else "saves"] += 1
        counts["rounds"] += 1
        counts["stale"] += any(each.startswith(".tmp-") for each in os.listdir(root))
    return counts


def main() -> None:
    rounds, root, *names = sys.argv[1:]
    for name in names:
        counts = kills(name, Path(root) / name, int(rounds))
        print(json.dumps({"store": name, **counts}), flush=True)


if __name__ == "__main__":
    main()
