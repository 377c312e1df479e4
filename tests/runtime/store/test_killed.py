"""SIGKILL at random moments: the next start always finds a verified state.

This file is a program too: python -m tests.runtime.store.test_killed ROUNDS ROOT STORE... It
imports the frameworks once and forks a child for every round. A child starts as a run would after a
crash: it opens the store, verifies everything that is listed, restores the newest known-good one,
and goes on. Prints a JSON line per store with what was counted, or dies of the first thing that is
not as it must be.
"""

import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from healcore.runtime.store import Keep, files
from healcore.runtime.store.manifest import sweep
from healcore.torch.store import DCPStore, MemoryStore
from tests import forked_programs
from tests.healer.killed_runs import forked
from tests.runtime.store import store_cases
from tests.runtime.store.store_cases import DCP, StoreCase

KEEP = Keep(good=2, candidates=2)
LONGEST = {"dcp": 0.06, "torch-tiers": 0.06, "orbax": 0.2, "jax-tiers": 0.2}
"""Store -> seconds until the latest kill: a few saves. A MemoryStore dies with its process."""
READY, SAVED, BACK = "ready", "saved", "back"


def state(case: StoreCase, step: int) -> dict[str, Any]:
    """A small state that only depends on the step. Nothing is compiled for it."""
    rng = np.random.default_rng(step)
    arrays = [rng.standard_normal((20, size), dtype=np.float32) for size in (1, 30, 400)]
    put = jax.device_put if case.in_jax else torch.from_numpy
    return {"weights": [put(each) for each in arrays], "step": {"is": step}}


def child(case: StoreCase, root: Path, log: Path, seconds: float) -> None:
    """Checks what is there, reports it, and saves until it is killed."""
    reports = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def report(what: str, step: int) -> None:
        os.write(reports, f"{what} {step}\n".encode())

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
    report(READY, saves[-1].step)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()
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
        report(SAVED, step)
        if step % 2 == 0:
            proven = step - 2
            store_cases.prune(store, KEEP)
        if turn % 4 == os.getpid() % 4:  # some processes are killed after one turn
            step = max(saved.step for saved in store.steps() if saved.status == "good")
            store.restore(step, state(case, 0))
            report(BACK, step)
            attempts.append(step)
            proven = min(proven, step)
            store.commit(step, {"step": step, "attempts": attempts, "proven": step})


def kills(name: str, root: Path, rounds: int) -> Counter[str]:
    """Kills one store's program again and again; what was counted."""
    case, rng, counts, last = store_cases.named(name), random.Random(name), Counter[str](), 0
    errors = root.with_suffix(".err")
    healing = {"step": 0, "attempts": [0], "proven": 0}

    def first() -> None:
        store = case.make(root)
        store.save(0, state(case, 0), healing=healing)
        store.wait()

    assert os.waitpid(forked(first, errors), 0)[1] == 0, errors.read_text()
    # More of them where no kill has hit a save yet: how often one does depends on the machine.
    while counts["rounds"] < rounds or not (counts["stale"] or counts["rounds"] >= 20 * rounds):
        log, seconds = root.with_suffix(f".{counts['rounds']}"), rng.random() * LONGEST[name]
        _, status = os.waitpid(forked(partial(child, case, root, log, seconds), errors), 0)
        assert os.WIFSIGNALED(status), errors.read_text()
        for what, step in (line.split() for line in log.read_text().splitlines()):
            if what == READY:
                assert int(step) >= last, f"step {last} was saved and is gone"
            last = max(last, int(step)) if what == SAVED else int(step)
            counts[what] += 1
        counts["rounds"] += 1
        counts["stale"] += any(each.startswith(".tmp-") for each in os.listdir(root))
    return counts


KILLS = [
    pytest.param(10, [*LONGEST], id="10 each"),  # one process for all: importing takes longer
    *(pytest.param(100, [each], marks=pytest.mark.stress, id=f"100 {each}") for each in LONGEST),
]


@pytest.mark.parametrize(("rounds", "stores"), KILLS)
def test_killed_many_times(rounds, stores, in_memory):
    program = "-m", "tests.runtime.store.test_killed", rounds, in_memory, *stores
    done = forked_programs.run(*program)
    assert done.returncode == 0, done.stderr[-3000:]
    counted = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(counted) == len(stores)
    for counts in counted:
        assert counts["rounds"] >= rounds
        assert counts["stale"] > 0, "no kill hit a save: change how long the processes run"
    # Over all stores: on a busy machine all ten processes of one store may be killed too early.
    assert sum(counts.get(SAVED, 0) + counts.get(BACK, 0) for counts in counted) > 0


def test_killed_while_deleting(tmp_path, monkeypatch):
    store = DCP.filled(tmp_path, 1, 2, healing={"attempts": [0], "proven": 2})

    def some(folder: Path) -> None:
        next(folder.rglob("*.distcp")).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(files.shutil, "rmtree", some)
    with pytest.raises(KeyboardInterrupt):
        store.delete(2)
    monkeypatch.undo()
    store = DCP.make(tmp_path)
    assert len(sweep(tmp_path)) == 1
    assert [(saved.step, saved.status) for saved in store.steps()] == [(1, "good")]
    assert store.damaged() == []
    store.verify(1)


class Slow(DCPStore):
    """Writes when the gate opens."""

    writing, gate = threading.Event(), threading.Event()

    def _write(self, captured: Any, folder: Path) -> Any:
        self.writing.set()
        assert self.gate.wait(60)
        return super()._write(captured, folder)


def test_a_child_that_is_forked_within_a_save_does_not_wait_for_its_parents_threads(tmp_path):
    store = Slow(tmp_path / "store", in_memory=Keep())
    store.save(1, {"w": torch.arange(9.0)})
    assert store.writing.wait(60)

    def child() -> None:
        # It can use what it inherits, and its end does not end the save.
        assert store.failures() == store.steps_on_disk() == []
        store.wait()
        assert [saved.step for saved in store.steps()] == [1]
        memory = MemoryStore()
        memory.save(5, {"w": torch.zeros(3)})
        assert [saved.step for saved in memory.steps()] == [5]

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert store.steps_on_disk() == []
    store.gate.set()
    store.wait()
    assert [saved.step for saved in store.steps()] == [1]
    store.verify(1)


if __name__ == "__main__":
    for name in sys.argv[3:]:
        print(json.dumps(kills(name, Path(sys.argv[2]) / name, int(sys.argv[1]))), flush=True)
