"""Forks a child while a save is under way. Argument: directory.

A child has none of the parent's threads and must not wait for them.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from healcore.runtime.store import Keep
from healcore.torch.store import DCPStore, MemoryStore

gate, writing = threading.Event(), threading.Event()


class Slow(DCPStore):
    """Writes when the gate opens."""

    def _write(self, captured: Any, folder: Path) -> Any:
        writing.set()
        assert gate.wait(60)
        return super()._write(captured, folder)


def forked(action: Callable[[], None]) -> int | None:
    """The exit code of a child that ends as those of multiprocessing do; None if it hangs."""
    child = multiprocessing.get_context("fork").Process(target=action)
    child.start()
    child.join(20)
    if child.exitcode is None:
        child.kill()
    return child.exitcode


def saves(root: Path) -> None:
    """A child while the parent saves."""
    store = Slow(root / "store", in_memory=Keep())
    store.save(1, {"w": torch.arange(9.0)})
    assert writing.wait(60)
    assert forked(lambda: None) == 0

    def child() -> None:
        # It can use what it inherits, and its end is not that of the save.
        assert store.failures() == []
        assert store.steps_on_disk() == []
        store.wait()
        assert [saved.step for saved in store.steps()] == [1]
        memory = MemoryStore()
        memory.save(5, {"w": torch.zeros(3)})
        assert [saved.step for saved in memory.steps()] == [5]

    assert forked(child) == 0
    assert any(name.startswith(".tmp-healcore") for name in os.listdir(root / "store"))

    began = time.monotonic()
    for _ in range(2):
        examples: Any = list(range(8))
        assert len(list(DataLoader(examples, num_workers=2))) == 8
    # 20 s if they are killed.
    assert time.monotonic() - began < 8, "the workers did not end by themselves"

    assert store.steps_on_disk() == []
    gate.set()
    store.wait()
    assert [saved.step for saved in store.steps()] == [1]
    store.verify(1)


if __name__ == "__main__":
    saves(Path(sys.argv[1]))
    print("fine")
