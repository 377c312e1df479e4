"""Disks that are full, read-only or gone, and what other processes left behind. All real."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from healcore.runtime.store import SaveFailed, StoreError
from healcore.runtime.store.files import place
from tests.store import worlds
from tests.store.disks import read_only, small_disk
from tests.store.worlds import DISKS, TIERS, World, over, same_states

ROOT = Path(__file__).parents[2]


def large(world: World, megabytes: int):
    """A state that does not compress."""
    import numpy as np

    state = world.state(9)
    noise = np.random.default_rng(0).bytes(megabytes << 20)
    state["values"]["noise"] = np.frombuffer(noise, np.uint8).copy()
    return state


def temporaries(root: Path) -> list[str]:
    return [name for name in os.listdir(root) if name.startswith(".tmp-")]


@over(*DISKS, *TIERS)
def test_disk_full(world, tmp_path):
    with small_disk(tmp_path / "disk", megabytes=4) as root:
        store = world.make(root)
        store.save(1, world.state(1))
        store.wait()
        store.mark(1, "good")
        store.save(2, large(world, 8))  # does not raise: training goes on
        with pytest.raises(SaveFailed, match="step 2 was not saved") as error:
            store.wait()
        assert error.value.step == 2
        assert "free some space" in str(error.value)
        store.wait()  # told once
        disk = getattr(store, "disk", store)
        assert [saved.step for saved in disk.steps()] == [1]
        assert temporaries(root) == []
        disk.verify(1)
        store.save(3, world.state(3))
        store.wait()
        assert [saved.step for saved in disk.steps()] == [1, 3]
        assert same_states(world.state(3), disk.restore(3, world.state(1)).state)
        assert same_states(world.state(1), disk.restore(1, world.state(1)).state)


@over(*DISKS)
def test_file_size_limit(world, tmp_path):
    """The same through a limit of the system, which needs no rights to set."""
    code = f"""
import resource, sys
from pathlib import Path
from tests.store import worlds
from tests.store.test_disk_faults import large
from healcore.runtime.store import SaveFailed
world = worlds.{world.name.upper()}
store = world.make(Path({str(tmp_path)!r}))
store.save(1, world.state(1)); store.wait()
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
store.save(2, large(world, 3))
try:
    store.wait()
except SaveFailed as error:
    print("failed", error.step, error.hint)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
store.save(3, world.state(3)); store.wait()
for step in (1, 3):
    store.verify(step)
print([saved.step for saved in store.steps()], store.problems())
"""
    done = run(code)
    hint = "the limit on file sizes is too small for it"
    assert done.stdout.splitlines() == [f"failed 2 {hint}", "[1, 3] []"], done.stderr


@over(*DISKS)
def test_read_only_directory(world, tmp_path):
    root = tmp_path / "checkpoints"
    store = world.make(root)
    store.save(1, world.state(1))
    store.wait()
    stale = root / f".tmp-healcore-{dead_pid()}-{place()}-00000000"
    stale.mkdir()
    with read_only(root):
        store = world.make(root)
        assert same_states(world.state(1), store.restore(1, world.state(2)).state)
        store.save(2, world.state(2))
        with pytest.raises(SaveFailed, match="point the store at a directory that can be written"):
            store.wait()
        for call in (lambda: store.mark(1, "good"), lambda: store.delete(1)):
            with pytest.raises(StoreError, match="step 1 cannot be"):
                call()
        assert [(saved.step, saved.status) for saved in store.steps()] == [(1, "candidate")]
        with pytest.raises(StoreError, match="cannot be used for checkpoints"):
            world.make(root / "new")
    assert world.make(root).swept == [stale.name]


@over(*DISKS)
def test_a_root_that_is_no_directory(world, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="pass a directory that can be made and written"):
        world.make(tmp_path / "file")


@over(*DISKS)
def test_a_failed_background_write_shows_at_wait_and_once(world, tmp_path):
    root = tmp_path / "checkpoints"
    store = world.make(root)
    shutil.rmtree(root)
    store.save(1, world.state(1))
    store.save(2, world.state(2))  # waits for the first and does not raise its error
    store._behind.join()
    told = store.failures()
    assert [failure.step for failure in told] == [1, 2]
    assert "has somebody deleted it" in str(told[0])
    assert store.failures() == []
    store.wait()
    with pytest.raises(StoreError, match="cannot be read"):
        store.steps()
    root.mkdir()
    store.save(3, world.state(3))
    store.wait()
    assert [saved.step for saved in store.steps()] == [3]


@over(*DISKS)
def test_own_leavings_are_cleaned_and_nothing_else(world, tmp_path):
    store = world.make(tmp_path)
    store.save(1, world.state(1))
    store.wait()
    folder = Path(store.steps()[0].path)
    with living_process() as alive:
        dead, here = dead_pid(), place()
        ours = [
            tmp_path / f".tmp-healcore-{dead}-{here}-0000000a",
            folder / f".tmp-healcore-{dead}-{here}-0000000b",
            # Our own number, from before a restart of the container: not on our list.
            tmp_path / f".tmp-healcore-{os.getpid()}-{here}-0000000c",
        ]
        others = [
            tmp_path / f".tmp-healcore-{alive}-{here}-0000000d",  # at work
            tmp_path / f".tmp-healcore-{dead}-deadbeef-0000000e",  # on another machine
            tmp_path / f".tmp-healcore-{dead}-{here}",  # not quite the shape
            tmp_path / ".tmp",
            tmp_path / "1.orbax-checkpoint-tmp",
            folder / ".tmp-somebody",
        ]
        for path in (*ours, *others):
            path.mkdir()
            (path / "part").write_text("")
        outside = tmp_path.parent / f"outside-{tmp_path.name}"
        outside.mkdir()
        (outside / "precious").write_text("")
        link = tmp_path / f".tmp-healcore-{dead}-{here}-0000000f"
        link.symlink_to(outside, target_is_directory=True)

        store = world.make(tmp_path)
        assert len(store.swept) == len(ours) + 1
        assert not any(path.exists() for path in ours)
        assert not link.is_symlink()
        assert (outside / "precious").exists()
        assert all((path / "part").exists() for path in others)
        assert any("deadbeef" in told for told in store.problems())
        assert not any(str(alive) in told for told in store.problems())
        store.verify(1)


def test_two_processes_can_save_into_one_directory(tmp_path):
    code = f"""
import sys
from pathlib import Path
from tests.store.worlds import DCP as world
store = world.make(Path({str(tmp_path)!r}))
for i in range(10):
    store.save(2 * i + int(sys.argv[1]), world.state(i)); store.wait()
"""
    both = [start(code, str(i)) for i in (0, 1)]
    assert [process.wait(120) for process in both] == [0, 0]
    store = worlds.DCP.make(tmp_path)
    assert [saved.step for saved in store.steps()] == list(range(20))
    assert store.problems() == []
    for saved in store.steps():
        store.verify(saved.step)


@over(worlds.DCP, worlds.JAX_TIERS)
def test_a_program_that_ends_finishes_its_save(world, tmp_path):
    name = next(name for name, value in vars(worlds).items() if value is world)
    code = f"""
import sys
from pathlib import Path
from tests.store.test_disk_faults import large
from tests.store.worlds import {name} as world
store = world.make(Path({str(tmp_path)!r}))
store.save(1, large(world, 8))
sys.exit(7)
"""
    done = run(code)
    assert (done.returncode, done.stderr) == (7, "")
    store = world.make(tmp_path)
    store.verify(1)
    assert store.problems() == []


def test_a_program_that_ends_tells_of_a_save_that_failed(tmp_path):
    code = f"""
import shutil
from pathlib import Path
from tests.store.worlds import DCP as world
store = world.make(Path({str(tmp_path / "gone")!r}))
shutil.rmtree(store.root)
store.save(1, world.state(1))
"""
    done = run(code)
    assert done.returncode == 0
    assert "step 1 was not saved" in done.stderr


def start(code: str, *arguments: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(code: str) -> subprocess.CompletedProcess:
    process = start(code)
    out, err = process.communicate(timeout=600)
    return subprocess.CompletedProcess([], process.returncode, out, err)


def dead_pid() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


class living_process:
    """A process that is there until the end of the block."""

    def __enter__(self) -> int:
        self._process = subprocess.Popen(["sleep", "60"])
        return self._process.pid

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
