"""SIGKILL at random moments: the next start always finds a verified state."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from healcore.runtime.store.manifest import sweep
from tests.runtime.store.programs import PROGRAMS, finish, run, start
from tests.runtime.store.store_cases import DCP

# MemoryStore is not here: it dies with its process.
STORES = ("dcp", "torch-tiers", "orbax", "jax-tiers")
KILLS = [
    pytest.param(10, STORES, id="10 each"),  # one process for all: importing takes longer
    *(pytest.param(100, (name,), marks=pytest.mark.stress, id=f"100 {name}") for name in STORES),
]
CLUTTER = 100


@pytest.mark.parametrize(("rounds", "stores"), KILLS)
def test_killed_many_times(rounds, stores, in_memory):
    done = run("tests.runtime.store.killed_program", rounds, in_memory, *stores)
    assert done.returncode == 0, done.stderr[-3000:]
    counted = [json.loads(line) for line in done.stdout.splitlines()]
    assert [counts["store"] for counts in counted] == list(stores)
    for counts in counted:
        assert counts["rounds"] >= rounds
        assert counts["stale"] > 0, "no kill hit a save: change how long the processes run"
    # Over all stores: on a busy machine all ten processes of one store may be killed too early.
    assert sum(counts["saves"] + counts["rollbacks"] for counts in counted) > 0


def test_killed_while_deleting(in_memory):
    """Killed in the middle of a deletion: of many files only some are gone."""
    store = DCP.filled(in_memory, 1, 2, healing={"attempts": [0], "proven": 2})
    folder = Path(store.steps()[1].path or "")
    for number in range(CLUTTER):
        (folder / "data" / f"clutter{number}").touch()
    before = files(in_memory)
    done = run(PROGRAMS, "killed_while_deleting", "dcp", in_memory, CLUTTER // 2)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert before - CLUTTER < files(in_memory) < before
    store = DCP.make(in_memory)
    assert len(sweep(in_memory)) == 1
    assert [(saved.step, saved.status) for saved in store.steps()] == [(1, "good")]
    assert store.damaged() == []
    store.verify(1)


def files(folder: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(folder))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_does_not_wait_for_its_parents_threads(tmp_path):
    finish(start(PROGRAMS, "forks", "dcp", tmp_path))
