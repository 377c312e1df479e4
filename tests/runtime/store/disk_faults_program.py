"""Programs whose saves meet a limit or the program's end. Arguments: what, store, directory."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from healcore.runtime.store import SaveFailed
from tests.runtime.store.store_cases import ALL, StoreCase


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


if __name__ == "__main__":
    found = next(case for case in ALL if case.name == sys.argv[2])
    globals()[sys.argv[1]](found, Path(sys.argv[3]), *map(int, sys.argv[4:]))
