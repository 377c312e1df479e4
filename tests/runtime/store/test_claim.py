"""One run at a time in a directory, with real processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from healcore.runtime.store import StoreError
from healcore.runtime.store.claim import LOCK, StoreInUse, claim
from healcore.runtime.store.manifest import incomplete
from healcore.torch.store import DCPStore
from tests.forked_programs import ROOT
from tests.hostile.run_directories import cut_short, go_on
from tests.runtime.store.programs import finish, start

PROGRAM = "tests.runtime.store.claim_program"


def hold(root: Path, at: float = 0.0) -> subprocess.Popen[str]:
    return start(PROGRAM, "hold", root, at)


def printed(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


def left_behind(root: Path) -> None:
    """The lock file that a killed process leaves."""
    process = hold(root)
    assert printed(process) == "held"
    end(process)
    assert (root / LOCK).exists()


def test_a_living_process_holds_it_and_a_killed_one_does_not(tmp_path):
    command = [sys.executable, "-m", PROGRAM, "hold", tmp_path, "0"]  # a child of this process
    pipe = subprocess.PIPE
    holder = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    assert printed(holder) == "held"
    with pytest.raises(StoreInUse, match=f"process {holder.pid} on") as raised:
        claim(tmp_path)
    assert isinstance(raised.value, StoreError)
    assert "pass another directory" in str(raised.value)
    holder.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # a zombie is as good as gone
    held = claim(tmp_path)
    assert held.warning is None
    end(holder)
    held.release()


@pytest.mark.parametrize("stale", [False, True])
def test_one_of_several_that_start_at_once_wins(tmp_path, stale):
    for turn in range(3):
        root = tmp_path / str(turn)
        root.mkdir()
        if stale:
            left_behind(root)
        several = [hold(root, at=time.time() + 1.0) for _ in range(5)]
        answers = [printed(each) for each in several]
        winner = several[answers.index("held")]
        answers.remove("held")
        # The winner may not have written its name yet.
        named = (f"process {winner.pid} on", f"a process that {LOCK} does not name")
        assert all(each.startswith(named) for each in answers)
        assert os.listdir(root) == [LOCK]
        end(*several)


def test_within_one_process(tmp_path):
    held = claim(tmp_path)
    with pytest.raises(StoreInUse, match="this process"):
        claim(tmp_path / ".." / tmp_path.name)
    del held  # an abandoned Healer, a notebook's cell that failed
    again = claim(tmp_path)
    again.release()
    again.release()
    other = claim(tmp_path)
    again.release()
    with pytest.raises(StoreInUse, match="this process"):
        claim(tmp_path)
    assert incomplete(tmp_path) == []
    other.release()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_child_neither_releases_nor_has_it(tmp_path):
    finish(start(PROGRAM, "fork", tmp_path))


@pytest.mark.parametrize("content", [b"", b"process 1 on elsewhere", b"\xff" * 1000])
def test_a_lock_file_that_nobody_has_locked_is_free(tmp_path, content):
    (tmp_path / LOCK).write_bytes(content)
    held = claim(tmp_path)
    assert held.warning is None
    held.release()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_child_that_outlives_the_run_does_not_keep_it(tmp_path):
    """A data loader's worker, which notices only after seconds that its parent was killed."""
    process = start(PROGRAM, "outlived", tmp_path, new_session=True)
    process.wait()
    try:
        assert (tmp_path / LOCK).exists()
        held = claim(tmp_path)
        assert held.warning is None
        held.release()
    finally:
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("what", ["a pipe", "a link", "a dangling link", "a directory"])
def test_what_is_no_file_is_refused(what, tmp_path):
    root, other = tmp_path / "root", tmp_path / "other"
    root.mkdir()
    if what == "a pipe":
        os.mkfifo(root / LOCK)
    elif what == "a directory":
        (root / LOCK).mkdir()
    else:
        if what == "a link":
            other.write_text("somebody's")
        (root / LOCK).symlink_to(other)
    with pytest.raises(StoreError, match=r"healcore\.lock is no regular file .*remove it"):
        claim(root)
    assert os.path.lexists(root / LOCK)
    assert what != "a link" or other.read_text() == "somebody's"


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    import fcntl

    def refuse(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    held = claim(tmp_path)
    assert "cannot be locked (No locks available)" in str(held.warning)
    held.release()


def test_a_disk_that_takes_no_file_is_a_warning(tmp_path):
    held = claim(tmp_path / "gone")
    assert held.warning is not None
    assert "a second run in this directory would not be noticed" in held.warning
    held.release()


def test_the_work_of_pods_that_are_gone_is_removed_by_a_run_that_has_the_lock(tmp_path):
    cut_short("torch", tmp_path)
    (checkpoint, *_) = sorted(tmp_path.glob("step-*"))
    old = tmp_path / ".tmp-healcore-1-deadbeef-0000000a"
    inside = checkpoint / ".tmp-healcore-1-deadbeef-0000000b"
    foreign = tmp_path / ".tmp-somebody"
    for path in (old, inside, foreign):
        (path / "data").mkdir(parents=True)
    DCPStore(tmp_path)
    assert old.exists(), "a store alone does not know whether another run is at work"
    go_on("torch", tmp_path)
    assert [path.exists() for path in (old, inside, foreign)] == [False, False, True]
