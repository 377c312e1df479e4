"""Programs that use stores in processes of their own, and functions that start programs.

python -m tests.runtime.store.programs PROGRAM STORE DIRECTORY [NUMBER]
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from healcore.runtime.store import Keep, SaveFailed
from healcore.torch.store import DCPStore, MemoryStore
from tests.forked_programs import ROOT, ForkedProgram
from tests.runtime.store.store_cases import ALL, StoreCase

PROGRAMS = "tests.runtime.store.programs"


def start(
    module: str, *arguments: object, new_session: bool = False, **environment: str
) -> subprocess.Popen[str]:
    """Starts `python -m module`, with pipes to and from it."""
    return ForkedProgram(
        "-m",
        module,
        *arguments,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=new_session,
    )


def run(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs it to its end."""
    process = start(module, *arguments)
    try:
        out, err = process.communicate(timeout=600)
    except BaseException:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def finish(*processes: subprocess.Popen[str]) -> None:
    """Waits for programs that print "fine" at their end."""
    ends = [process.communicate(timeout=600) for process in processes]
    for process, (out, err) in zip(processes, ends, strict=True):
        assert process.returncode == 0, err[-4000:]
        assert out.splitlines()[-1] == "fine"


# -- saves that meet a limit, or the program's end -----------------------------------------------


def large(case: StoreCase, megabytes: int) -> dict[str, Any]:
    """A state that does not compress."""
    state = case.state(9)
    noise = np.random.default_rng(0).bytes(megabytes << 20)
    state["values"]["noise"] = np.frombuffer(noise, np.uint8).copy()
    return state


def file_size_limit(case: StoreCase, root: Path) -> None:
    """A disk that is full, by a limit of the system, which needs no rights to set."""
    store = case.filled(root, 1)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    store.save(2, large(case, 3))
    try:
        store.wait()
    except SaveFailed as error:
        print("failed", error.step)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    store.save(3, case.state(3))
    store.wait()
    for step in (1, 3):
        store.verify(step)
    print([saved.step for saved in store.steps()], store.damaged())


def ends(case: StoreCase, root: Path) -> None:
    """Ends while a save is being written."""
    store = case.make(root)
    store.save(1, large(case, 8))
    sys.exit(7)


def killed_while_deleting(case: StoreCase, root: Path, files: int) -> None:
    """Deletes the checkpoint of step 2, and kills itself before it removes so many files."""
    removed = itertools.count(1)

    def kill(event: str, arguments: Any) -> None:
        if event == "os.remove" and next(removed) == files:
            os.kill(os.getpid(), signal.SIGKILL)

    store = case.make(root)
    sys.addaudithook(kill)
    store.delete(2)


# -- a child that is forked while a save is under way ---------------------------------------------


gate, writing = threading.Event(), threading.Event()


class Slow(DCPStore):
    """Writes when the gate opens."""

    def _write(self, captured: Any, folder: Path) -> Any:
        writing.set()
        assert gate.wait(60)
        return super()._write(captured, folder)


def forked(action: Callable[[], None]) -> int | None:
    """The exit code of a child that ends like a child of multiprocessing; None if it hangs."""
    child = multiprocessing.get_context("fork").Process(target=action)
    child.start()
    child.join(20)
    if child.exitcode is None:
        child.kill()
    return child.exitcode


def forks(case: StoreCase, root: Path) -> None:
    """Forks children while a save of a `DCPStore` is under way.

    A child has none of the parent's threads and must not wait for them.
    """
    del case
    store = Slow(root / "store", in_memory=Keep())
    store.save(1, {"w": torch.arange(9.0)})
    assert writing.wait(60)
    assert forked(lambda: None) == 0

    def child() -> None:
        # It can use what it inherits, and its end does not end the save.
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
    print("fine")


if __name__ == "__main__":
    found = next(case for case in ALL if case.name == sys.argv[2])
    globals()[sys.argv[1]](found, Path(sys.argv[3]), *map(int, sys.argv[4:]))
