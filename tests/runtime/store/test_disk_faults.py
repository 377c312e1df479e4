"""Disks that are full or read-only, and what earlier processes have left. All faults are real."""

import os
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from healcore.runtime.store.checkpoints import SaveFailed, StoreError
from healcore.runtime.store.manifest import sweep
from tests import forked_programs
from tests.runtime.store.disk_faults import read_only, small_disk
from tests.runtime.store.store_cases import (
    DCP,
    DISKS,
    JAX_TIERS,
    TIERS,
    StoreCase,
    mark_good,
    over,
    same_states,
)


def large(case: StoreCase, megabytes: int) -> dict[str, Any]:
    """A state that does not compress."""
    state = case.state(9)
    noise = np.random.default_rng(0).bytes(megabytes << 20)
    state["values"]["noise"] = np.frombuffer(noise, np.uint8).copy()
    return state


@contextmanager
def size_limit(path: Path, megabytes: int) -> Iterator[Path]:
    """The same through a limit for each file, which needs no rights to set."""
    path.mkdir()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (megabytes << 20, hard))
    try:
        yield path
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


FULL = [*((each, small_disk) for each in (*DISKS, *TIERS)), *((each, size_limit) for each in DISKS)]


@pytest.mark.parametrize(("case", "disk"), FULL, ids=lambda each: getattr(each, "name", None))
def test_a_full_disk_costs_one_save_and_not_the_training(case, disk, tmp_path):
    with disk(tmp_path / "disk", megabytes=4) as root:
        store = case.filled(root, 1)
        mark_good(store, 1)
        store.save(2, large(case, 8))  # does not raise: training continues
        with pytest.raises(SaveFailed, match=r"No space left|too large") as error:
            store.wait()
        store.wait()  # raised once
        assert (error.value.step, store.steps_on_disk()) == (2, [1])
        store.verify(1)
        late = root / ".tmp-healcore-0000000000000000"  # as a thread of the framework that goes on
        late.mkdir()
        deadline = time.monotonic() + 60
        while late.exists() or any(name.startswith(".tmp-") for name in os.listdir(root)):
            assert time.monotonic() < deadline, os.listdir(root)
            store.save(3, case.state(3))  # each save removes what was written late
            store.wait()
        assert store.steps_on_disk() == [1, 3]
        for step in (1, 3):
            assert same_states(case.state(step), case.make(root).restore(step, case.state(2)).state)


@over(*DISKS)
def test_a_read_only_directory_can_still_be_restored_from(case, tmp_path):
    root = tmp_path / "checkpoints"
    case.filled(root, 1)
    stale = root / ".tmp-healcore-0000000000000000"
    stale.mkdir()
    with read_only(root):
        store = case.make(root)
        assert same_states(case.state(1), store.restore(1, case.state(2)).state)
        store.save(2, case.state(2))
        with pytest.raises(SaveFailed, match=r"[Rr]ead-only|denied"):
            store.wait()
        for call in (lambda: mark_good(store, 1), lambda: store.delete(1)):
            with pytest.raises(StoreError, match="step 1 cannot be"):
                call()
        assert [(saved.step, saved.status) for saved in store.checkpoints()] == [(1, "candidate")]
        with pytest.raises(StoreError, match="cannot be used for checkpoints"):
            case.make(root / "new")
    assert sweep(root) == [stale.name]


@over(*DISKS)
def test_a_failed_background_write_shows_at_wait_and_once(case, tmp_path):
    store = case.make(tmp_path / "checkpoints")
    shutil.rmtree(tmp_path / "checkpoints")
    store.save(1, case.state(1))
    store.save(2, case.state(2))  # waits for the first and does not raise its error
    store.join()
    first, second = store.take_failures()
    assert (first.step, second.step, "No such file" in str(first)) == (1, 2, True)
    assert store.take_failures() == []
    store.wait()
    with pytest.raises(StoreError, match="cannot be read"):
        store.checkpoints()


def test_stale_files_are_removed_and_nothing_else(tmp_path):
    store = DCP.filled(tmp_path, 1)
    folder = Path(store.checkpoints()[0].path)
    name = ".tmp-healcore-000000000000000"
    ours = [tmp_path / f"{name}a", folder / f"{name}b"]
    # Not quite the shape, somebody else's, and what a link leads to.
    names = (".tmp-healcore-a", "1.orbax-checkpoint-tmp", f"{folder.name}/.tmp-somebody", "other")
    others = [tmp_path / each for each in names]
    for path in (*ours, *others):
        path.mkdir()
        (path / "part").touch()
    link = tmp_path / f"{name}f"
    link.symlink_to(others[-1], target_is_directory=True)
    assert len(sweep(tmp_path)) == len(ours) + 1
    assert not any(path.exists() for path in (*ours, link))
    assert all((path / "part").exists() for path in others)
    store.verify(1)


ENDS = """
import pathlib, sys
from tests.runtime.store import store_cases, test_disk_faults
case = store_cases.named(sys.argv[1])
case.make(pathlib.Path(sys.argv[2])).save(1, test_disk_faults.large(case, 8))
sys.exit(7)
"""


@pytest.mark.slow
@over(DCP, JAX_TIERS)
def test_a_program_that_ends_finishes_its_save(case, tmp_path):
    done = forked_programs.run("-c", ENDS, case.name, tmp_path)
    assert (done.returncode, done.stderr) == (7, "")
    store = case.make(tmp_path)
    store.verify(1)
    assert store.damaged() == []
