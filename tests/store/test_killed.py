"""SIGKILL at random moments: the next start always finds a verified state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store import worlds

ROOT = Path(__file__).parents[2]
# MemoryStore is not here: it dies with its process, and is only ever a tier before one of these.
STORES = ("dcp", "torch-tiers", "orbax", "jax-tiers")
KILLS = [
    pytest.param(10, STORES, id="10 each"),  # one process for all: importing takes longer
    *(pytest.param(100, (name,), marks=pytest.mark.stress, id=f"100 {name}") for name in STORES),
]
CLUTTER = 3000


@pytest.fixture
def root() -> Iterator[Path]:
    """In memory where that is: to a kill all file systems are the same, and syncing takes time."""
    memory = Path("/dev/shm")
    at = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="healcore-killed-", dir=at) as folder:
        yield Path(folder)


@pytest.mark.parametrize(("rounds", "stores"), KILLS)
def test_killed_many_times(rounds, stores, root):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.store.killed", str(rounds), root, *stores],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [counts["store"] for counts in told] == list(stores)
    for counts in told:
        assert counts["rounds"] >= rounds
        assert counts["leavings"] > 0, "no kill hit a save: make the lives shorter or longer"
    # Over all stores: on a machine that is busy ten lives of one may all end too early.
    assert sum(counts["saves"] + counts["rollbacks"] for counts in told) > 0


def test_killed_while_deleting(root):
    """In the middle of it for certain: there are thousands of files, and some have gone."""
    code = f"""
from pathlib import Path
from tests.store.worlds import DCP
DCP.make(Path({str(root)!r})).delete(2)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    store = worlds.DCP.make(root)
    for step in (1, 2):
        store.save(step, worlds.torch_state(step))
        store.wait()
        store.mark(step, "good")
    folder = Path(store.steps()[1].path or "")
    for number in range(CLUTTER):
        (folder / "data" / f"clutter{number}").touch()
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment)
    while process.poll() is None and files(root) > CLUTTER:
        pass
    process.kill()
    process.wait()
    assert 0 < files(root) < CLUTTER, "the kill came too early or too late"
    store = worlds.DCP.make(root)
    assert len(store.swept) == 1
    assert [(saved.step, saved.status) for saved in store.steps()] == [(1, "good")]
    assert store.problems() == []
    store.verify(1)


def files(folder: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(folder))
