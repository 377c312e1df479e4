"""A kill or a fork within a save, and a kill within a deletion."""

import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from healcore.runtime.store import files, writer
from healcore.runtime.store.checkpoints import Keep
from healcore.runtime.store.manifest import sweep
from healcore.torch.store import DCPStore, MemoryStore
from tests import forked_programs
from tests.forked_programs import ROOT
from tests.runtime.store.disk_faults import before_completion
from tests.runtime.store.store_cases import (
    DCP,
    DISKS,
    over,
)

KILLED = """
import os, pathlib, sys
from functools import partial
import jax, numpy, torch
from tests.healer.killed_runs import WRITE, Aim, Watched, forked
from tests.runtime.store import store_cases

name, root = sys.argv[1], pathlib.Path(sys.argv[2])
case = store_cases.named(name)

def start(calls):
    store = case.make(root / "store")
    assert store.damaged() == [], store.damaged()
    found = [each.step for each in store.checkpoints()]
    for step in found:
        store.verify(step)
    assert found or calls is None, "the first one is gone"
    if calls is not None:
        Watched(root / "phases", Aim(WRITE, 1, calls=calls))
    put = jax.device_put if case.in_jax else torch.from_numpy
    store.save(max(found, default=0) + 1, {"w": put(numpy.arange(999.0, dtype="f"))}, record={})
    store.wait()

for calls in (None, *range(26), None):  # Orbax changes the disk 25 times
    _, status = os.waitpid(forked(partial(start, calls), root / "errors"), 0)
    assert status == (0 if calls is None else 9), (root / "errors").read_text()
"""
"""Kills a save before its first, second, ... change of the disk, or at its end."""


@pytest.mark.slow
@over(*DISKS)
def test_a_kill_anywhere_in_a_save_leaves_whole_checkpoints(case, tmp_path):
    done = forked_programs.run("-c", KILLED, case.name, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_kill_while_deleting_leaves_no_damaged_checkpoint(tmp_path, monkeypatch):
    store = DCP.filled(tmp_path, 1, 2, record={"attempts": [0], "known_good_up_to": 2})

    def some(folder: Path) -> None:
        next(folder.rglob("*.distcp")).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(files.shutil, "rmtree", some)
    with pytest.raises(KeyboardInterrupt):
        store.delete(2)
    monkeypatch.undo()
    store = DCP.make(tmp_path)
    assert len(sweep(tmp_path)) == 1
    assert [(saved.step, saved.status) for saved in store.checkpoints()] == [(1, "good")]
    assert store.damaged() == []
    store.verify(1)


def test_a_child_that_is_forked_within_a_save_does_not_wait_for_its_parents_threads(
    tmp_path, monkeypatch
):
    writing, gate = threading.Event(), threading.Event()

    def waits(checkpoint: Path) -> None:
        writing.set()
        assert gate.wait(60)

    before_completion(monkeypatch, waits)
    store = DCPStore(tmp_path / "store", in_memory=Keep())
    store.save(1, {"w": torch.arange(9.0)})
    assert writing.wait(60)

    def child() -> None:
        # It can use what it inherits, and its end does not end the save.
        assert store.take_failures() == store.steps_on_disk() == []
        store.wait()
        assert [saved.step for saved in store.checkpoints()] == [1]
        memory = MemoryStore()
        memory.save(5, {"w": torch.zeros(3)})
        memory.wait()
        assert [saved.step for saved in memory.checkpoints()] == [5]

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert store.steps_on_disk() == []
    # A second may be over on a busy machine, and a save that waits for the fork never ends.
    monkeypatch.setattr(writer, "FORK_WAIT", 10.0)
    threading.Timer(0.1, gate.set).start()
    multiprocessing.get_context("fork").Process(target=int).start()  # waits, for locks of libc
    assert store.take_failures() == []
    assert store.steps_on_disk() == [1]
    store.verify(1)


IMPORTED_FIRST = """
import sys
import healcore.runtime.store.writer
import concurrent.futures.thread
import pytest
name = "does_not_wait_for_its_parents_threads"
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", name, sys.argv[1]]))
"""


@pytest.mark.slow
def test_a_save_does_not_wait_for_the_fork_that_waits_for_it():
    """Hooks run the newest first, and `concurrent.futures` has one with a lock that a save needs.

    In a process that imports healcore first, its own hook was the older one.
    """
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED_FIRST, __file__],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
