"""Disks that are full, read-only or gone, and leftovers of other processes. All faults are real."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from healcore.runtime.store import SaveFailed, StoreError, files
from healcore.runtime.store.manifest import sweep
from tests.runtime.store.disk_faults import read_only, small_disk
from tests.runtime.store.programs import PROGRAMS, large, run
from tests.runtime.store.store_cases import (
    DCP,
    DISKS,
    JAX_TIERS,
    TIERS,
    mark_good,
    over,
    same_states,
)


def on_disk(store) -> list[int]:
    return store.steps_on_disk()


@over(*DISKS, *TIERS)
def test_disk_full(case, tmp_path):
    with small_disk(tmp_path / "disk", megabytes=4) as root:
        store = case.filled(root, 1)
        mark_good(store, 1)
        store.save(2, large(case, 8))  # does not raise: training continues
        with pytest.raises(SaveFailed, match="No space left") as error:
            store.wait()
        assert error.value.step == 2
        store.wait()  # raised once
        assert on_disk(store) == [1]
        assert not [name for name in os.listdir(root) if name.startswith(".tmp-")]
        store.verify(1)
        store.save(3, case.state(3))
        store.wait()
        assert on_disk(store) == [1, 3]
        for step in (1, 3):
            assert same_states(case.state(step), case.make(root).restore(step, case.state(2)).state)


@over(*DISKS)
def test_file_size_limit(case, tmp_path):
    """The same through a limit of the system, which needs no rights to set."""
    done = run(PROGRAMS, "file_size_limit", case.name, tmp_path)
    assert done.stdout.splitlines() == ["failed 2", "[1, 3] []"], done.stderr


@over(*DISKS)
def test_read_only_directory(case, tmp_path):
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
        assert [(saved.step, saved.status) for saved in store.steps()] == [(1, "candidate")]
        with pytest.raises(StoreError, match="cannot be used for checkpoints"):
            case.make(root / "new")
    assert sweep(root) == [stale.name]


@over(*DISKS)
def test_a_failed_background_write_shows_at_wait_and_once(case, tmp_path):
    root = tmp_path / "checkpoints"
    store = case.make(root)
    shutil.rmtree(root)
    store.save(1, case.state(1))
    store.save(2, case.state(2))  # waits for the first and does not raise its error
    store.join()
    failures = store.failures()
    assert [failure.step for failure in failures] == [1, 2]
    assert "No such file" in str(failures[0])
    assert store.failures() == []
    store.wait()
    with pytest.raises(StoreError, match="cannot be read"):
        store.steps()
    root.mkdir()
    store.save(3, case.state(3))
    store.wait()
    assert on_disk(store) == [3]


def test_stale_files_are_removed_and_nothing_else(tmp_path):
    store = DCP.filled(tmp_path, 1)
    folder = Path(store.steps()[0].path)
    name = ".tmp-healcore-000000000000000"
    ours = [tmp_path / f"{name}a", folder / f"{name}b"]
    others = [
        tmp_path / ".tmp-healcore-a",  # not quite the shape
        tmp_path / ".tmp",
        tmp_path / "1.orbax-checkpoint-tmp",
        folder / ".tmp-somebody",
        tmp_path.parent / f"outside-{tmp_path.name}",
    ]
    for path in (*ours, *others):
        path.mkdir()
        (path / "part").write_text("")
    link = tmp_path / f"{name}f"
    link.symlink_to(others[-1], target_is_directory=True)
    assert len(sweep(tmp_path)) == len(ours) + 1
    assert not any(path.exists() for path in (*ours, link))
    assert all((path / "part").exists() for path in others)
    assert store.damaged() == []
    store.verify(1)


def test_a_directory_that_a_thread_still_writes_is_removed(tmp_path):
    """Orbax writes its arrays at the same time, and reports the first that fails."""
    folder, ends = tmp_path / "save", time.monotonic() + 0.05

    def write() -> None:
        number = 0
        while time.monotonic() < ends:
            folder.mkdir(exist_ok=True)
            part = folder / f"{(number := number + 1)}.lock"
            with suppress(FileNotFoundError):
                part.touch()
                part.rename(folder / f"{number}")

    folder.mkdir()
    with ThreadPoolExecutor() as pool:
        pool.submit(write)
        time.sleep(0.02)
        assert files.discard(folder)


@over(DCP, JAX_TIERS)
def test_a_program_that_ends_finishes_its_save(case, tmp_path):
    done = run(PROGRAMS, "ends", case.name, tmp_path)
    assert (done.returncode, done.stderr) == (7, "")
    store = case.make(tmp_path)
    store.verify(1)
    assert store.damaged() == []
