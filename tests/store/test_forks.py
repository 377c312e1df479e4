"""A child forked while a save is under way has none of our threads, and waits for none of them."""

from __future__ import annotations

import os

import pytest

from tests.store.test_several import finish, start

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")

BEGIN = """
import multiprocessing, os, sys, threading, time
from pathlib import Path
import torch
from healcore.torch.store import DCPStore, MemoryStore, TieredStore

root = Path(sys.argv[1])
gate, writing = threading.Event(), threading.Event()
class Slow(DCPStore):
    def _write(self, captured, folder):
        writing.set()
        assert gate.wait(60)
        return super()._write(captured, folder)

def begun():
    store = TieredStore(MemoryStore(), Slow(root / "store"))
    store.save(1, {"w": torch.arange(9.0)})
    assert writing.wait(60)
    return store

def forked(action):
    '''The exit code of a child that ends as those of multiprocessing do; None if it hangs.'''
    child = multiprocessing.get_context("fork").Process(target=action)
    child.start()
    child.join(20)
    if child.exitcode is None:
        child.kill()
    return child.exitcode
"""

SAVES = """
store = begun()
assert forked(lambda: None) == 0

def child():
    # What it inherits can be asked, and its end is not that of the save.
    assert not store.busy and store.failures() == []
    assert store.disk.steps() == []
    store.wait()
    # A start in the same directory takes the parent's work for nobody else's.
    assert DCPStore(root / "store").swept == []
    store.memory.save(5, {"w": torch.zeros(3)})
    assert 5 in [saved.step for saved in store.memory.steps()]
assert forked(child) == 0
assert any(name.startswith(".tmp-healcore") for name in os.listdir(root / "store"))

from torch.utils.data import DataLoader
began = time.monotonic()
for _ in range(2):
    assert len(list(DataLoader(list(range(8)), num_workers=2))) == 8
assert time.monotonic() - began < 8, "the workers did not end by themselves"  # 20 s if killed

assert store.busy
gate.set()
store.wait()
assert [saved.step for saved in store.steps()] == [1]
store.verify(1)
print("fine")
"""

LOCKS = """
from healcore.runtime.events import Log
log, memory = Log(root / "x.events.jsonl"), MemoryStore()
memory.save(1, {"w": torch.zeros(3)})
memory.wait()
held = threading.Event()
def holds():
    with log._lock, memory._lock:
        held.set()
        gate.wait(60)
threading.Thread(target=holds).start()
assert held.wait(60)
def child():
    assert log.write("problem", step=None, text="from a child")
    assert len(memory.steps()) == 1
assert forked(child) == 0

from healcore.runtime.checkpoints.background_verifier import BackgroundVerifier
class Waits:
    def verify(self, step):
        writing.set()
        assert gate.wait(60)
    def mark(self, step, status):
        pass
verifier = BackgroundVerifier()
verifier.verify(Waits(), 1)
assert writing.wait(60)
def child():
    assert verifier.results() == []
    gate.set()
    verifier.verify(Waits(), 2)
    verifier.wait()
    assert verifier.results() == [(2, None)]
    verifier.verify(Waits(), 3)
    verifier.discard()
assert forked(child) == 0
gate.set()
verifier.wait()
assert verifier.results() == [(1, None)]
print("fine")
"""


@pytest.mark.parametrize("life", [SAVES, LOCKS], ids=["saves", "locks"])
def test_a_child_does_not_wait_for_what_its_parent_does(tmp_path, life):
    finish(start(BEGIN + life, tmp_path))
