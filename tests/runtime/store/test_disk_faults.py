"""Disks that are full, read-only or damaged, kills, and directories that another run holds."""

import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from healcore.runtime.store import files, forks, single_file
from healcore.runtime.store.checkpoints import CheckpointDamaged, Keep, SaveFailed, StoreError
from healcore.runtime.store.checksums import ChecksumError, unseal
from healcore.runtime.store.claim import LOCK, StoreInUse, claim
from healcore.runtime.store.manifest import sweep
from healcore.torch.store import DCPStore, MemoryStore
from tests import forked_programs
from tests.forked_programs import ROOT, ForkedProgram
from tests.hostile.run_directories import cut_short, go_on
from tests.runtime.store.disk_faults import before_completion, flip, read_only, small_disk
from tests.runtime.store.store_cases import (
    DCP,
    DISKS,
    JAX_TIERS,
    ORBAX,
    SINGLE_FILES,
    TIERS,
    StoreCase,
    mark_good,
    over,
    same_states,
)

# -- full or read-only disks, and leftovers; all faults are real ----------------------------------


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
def test_a_full_disk_costs_one_save_and_not_the_training(case, disk, tmp_path, monkeypatch):
    with disk(tmp_path / "disk", megabytes=4) as root:
        store = case.filled(root, 1)
        mark_good(store, 1)
        mkdir = os.mkdir
        folders = []

        def recorded(path: Path, *mode: int) -> None:
            if Path(path).parent == root:
                folders.append(Path(path))
            mkdir(path, *mode)

        monkeypatch.setattr(os, "mkdir", recorded)
        store.save(2, large(case, 8))  # does not raise: training continues
        with pytest.raises(SaveFailed, match=r"No space left|too large") as error:
            store.wait()
        store.wait()  # raised once
        assert (error.value.step, store.steps_on_disk()) == (2, [1])
        store.verify(1)
        (folders[0] / "late").mkdir(parents=True, exist_ok=True)  # as a thread of the framework may
        store.save(3, case.state(3))
        store.wait()
        assert not [name for name in os.listdir(root) if name.startswith(".tmp-")]
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


def test_a_directory_that_a_thread_still_writes_is_removed(tmp_path, monkeypatch):
    """Orbax writes its arrays at the same time, and reports the first that fails."""
    folder = tmp_path / "save"
    rmtree = shutil.rmtree
    calls = []

    def with_a_new_file(path: Path) -> None:
        calls.append(path)
        if len(calls) < 3:
            (path / f"{len(calls)}.lock").touch()
            raise OSError(39, "Directory not empty")
        rmtree(path)

    folder.mkdir()
    monkeypatch.setattr(files.shutil, "rmtree", with_a_new_file)
    assert files.discard(folder)
    assert not folder.exists()


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


# -- flipped bits and missing files are noticed, and an older checkpoint is used ------------------

HEALING = {"attempts": [0], "known_good_up_to": 2}


def two_saves(case: StoreCase, root: Path) -> Path:
    """Known-good checkpoints of steps 1 and 2; returns the newer one's directory."""
    return Path(case.filled(root, 1, 2, record=HEALING).checkpoints()[1].path)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
@over(*DISKS)
def test_60_of_60_flipped_bits_are_noticed_and_the_older_one_is_intact(case, tmp_path):
    newer = two_saves(case, tmp_path)
    targets = files_of(newer)
    sizes = [path.stat().st_size for path in targets]
    rng = random.Random(20261120)
    like = case.state(3)
    for _ in range(60):
        (path,) = rng.choices(targets, sizes)
        bit = rng.randrange(path.stat().st_size * 8)
        flip(path, bit)
        store = case.make(tmp_path)  # what the next start sees
        for call in (store.verify, lambda step, store=store: store.restore(step, like)):
            with pytest.raises(CheckpointDamaged) as error:
                call(2)
            assert error.value.file == path.relative_to(newer).as_posix()
        found = store.restore(1, like)
        assert found.record == HEALING
        assert same_states(case.state(1), found.state)
        flip(path, bit)
    assert same_states(case.state(2), case.make(tmp_path).restore(2, like).state)


@pytest.mark.slow
@over(DCP, ORBAX)
def test_every_bit_of_the_manifest(case, tmp_path):
    newer = two_saves(case, tmp_path)
    manifest = newer / "manifest.json"
    data = manifest.read_bytes()
    for bit in range(len(data) * 8):
        spoilt = bytearray(data)
        spoilt[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ChecksumError):
            unseal(bytes(spoilt))
    flip(manifest, 8 * (len(data) // 2))
    store = case.make(tmp_path)
    assert [saved.step for saved in store.checkpoints()] == [1]
    assert [(Path(e.path).name, e.file) for e in store.damaged()] == [(newer.name, "manifest.json")]


@pytest.mark.slow
@over(*SINGLE_FILES)
def test_every_bit_of_the_header_of_a_single_file(case, tmp_path):
    newer = two_saves(case, tmp_path)
    path = newer / single_file.FILE
    digest = single_file.digest_of(path)
    for bit in range(single_file.read_header(path).start * 8):
        flip(path, bit)
        try:
            unseal(single_file.read_header(path).manifest.encode())
            found = single_file.digest_of(path)
        except ChecksumError:
            found = None
        assert found != digest, bit
        flip(path, bit)
    flip(path, 8 * 100)
    store = case.make(tmp_path)
    assert [saved.step for saved in store.checkpoints()] == [1]
    assert [(Path(e.path).name, e.file) for e in store.damaged()] == [(newer.name, path.name)]


@over(*DISKS)
@pytest.mark.parametrize("how", ["truncated", "longer", "a directory"])
def test_a_file_that_is_not_whole(case, tmp_path, how):
    newer = two_saves(case, tmp_path)
    for path in files_of(newer):
        data = path.read_bytes()
        path.unlink()
        if how == "truncated" and data:
            path.write_bytes(data[:-1])
        elif how == "longer":
            path.write_bytes(data + b"\0")
        elif how == "a directory":
            path.mkdir()
        store = case.make(tmp_path)
        assert [saved.step for saved in store.checkpoints()] == [1], path
        assert [Path(error.path).name for error in store.damaged()] == [newer.name]
        with pytest.raises(CheckpointDamaged, match=path.name):
            store.restore(2, case.state(2))
        if path.is_dir():
            path.rmdir()
        path.write_bytes(data)
    assert [saved.step for saved in case.make(tmp_path).checkpoints()] == [1, 2]


# -- one run at a time in a directory, with real processes ----------------------------------------

CLAIMS = """
import sys, time
from healcore.runtime.store.claim import StoreInUse, claim
time.sleep(max(0.0, float(sys.argv[2]) - time.time()))
try:
    held = claim(sys.argv[1])
    print("held" if held.warning is None else held.warning, flush=True)
except StoreInUse as error:
    print(error.holder, flush=True)
sys.stdin.read()
"""
"""Claims a directory at a point in time, prints the result, and holds it until stdin ends."""


PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


def answers_of(*processes: subprocess.Popen[str]) -> list[str]:
    """What each process prints: "held", or the holder."""
    return [each.stdout.readline().strip() for each in processes if each.stdout]


def end(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


def test_a_living_process_holds_it_and_a_killed_one_does_not(tmp_path):
    command = [sys.executable, "-c", CLAIMS, tmp_path, "0"]  # a child of this process
    holder = subprocess.Popen(command, cwd=ROOT, text=True, **PIPES)
    assert answers_of(holder) == ["held"]
    with pytest.raises(StoreInUse, match=f"process {holder.pid} on .*pass another directory"):
        claim(tmp_path)
    holder.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # a zombie is as good as gone
    held = claim(tmp_path)
    assert held.warning is None
    end(holder)
    held.release()


@pytest.mark.parametrize("stale", [False, True])
def test_one_of_several_that_start_at_once_wins(tmp_path, stale):
    if stale:  # the lock file that a killed process leaves
        killed = ForkedProgram("-c", CLAIMS, tmp_path, 0.0, **PIPES)
        assert answers_of(killed) == ["held"]
        end(killed)
        assert (tmp_path / LOCK).exists()
    at = time.time() + 1.0
    several = [ForkedProgram("-c", CLAIMS, tmp_path, at, **PIPES) for _ in range(5)]
    answers = answers_of(*several)
    winner = several[answers.index("held")]
    answers.remove("held")
    # The winner may not have written its name yet.
    named = (f"process {winner.pid} on", f"a process that {LOCK} does not name")
    assert all(each.startswith(named) for each in answers)
    assert os.listdir(tmp_path) == [LOCK]
    end(*several)


def test_the_work_of_pods_that_are_gone_is_removed_by_a_run_that_has_the_lock(tmp_path):
    cut_short("torch", tmp_path)
    old = tmp_path / ".tmp-healcore-000000000000000a" / "data"
    old.mkdir(parents=True)
    held = claim(tmp_path)
    with pytest.raises(StoreInUse):
        go_on("torch", tmp_path)
    assert old.exists(), "another run may be at work"
    held.release()
    go_on("torch", tmp_path)
    assert not old.parent.exists()


# -- kills in a save and in a deletion, and a fork in a save --------------------------------------

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
        assert [saved.step for saved in memory.checkpoints()] == [5]

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert store.steps_on_disk() == []
    # A second may be over on a busy machine, and a save that waits for the fork never ends.
    monkeypatch.setattr(forks, "FORK_WAIT", 10.0)
    threading.Timer(0.1, gate.set).start()
    multiprocessing.get_context("fork").Process(target=int).start()  # waits, for locks of libc
    assert store.take_failures() == []
    assert not store.busy
    assert store.steps_on_disk() == [1]
    store.verify(1)


IMPORTED_FIRST = """
import sys
import healcore.runtime.store.forks
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
