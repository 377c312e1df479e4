"""One run at a time in a directory, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from healcore.runtime.store import StoreError
from healcore.runtime.store.claim import LOCK, StoreInUse, claim
from tests.forked_programs import ROOT
from tests.hostile.run_directories import cut_short, go_on
from tests.runtime.store.programs import start

PROGRAM = "tests.runtime.store.claim_program"


def answers_of(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What each process prints: "held", or the holder."""
    return [each.stdout.readline().strip() for each in processes if each.stdout]


def end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


def test_a_living_process_holds_it_and_a_killed_one_does_not(tmp_path):
    command = [sys.executable, "-m", PROGRAM, tmp_path, "0"]  # a child of this process
    pipe = subprocess.PIPE
    holder = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    assert answers_of([holder]) == ["held"]
    with pytest.raises(StoreInUse, match=f"process {holder.pid} on .*pass another directory"):
        claim(tmp_path)
    holder.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # a zombie is as good as gone
    held = claim(tmp_path)
    assert held.warning is None
    end([holder])
    held.release()


@pytest.mark.parametrize("stale", [False, True])
def test_one_of_several_that_start_at_once_wins(tmp_path, stale):
    for turn in range(3):
        root = tmp_path / str(turn)
        root.mkdir()
        if stale:  # the lock file that a killed process leaves
            killed = [start(PROGRAM, root, 0.0)]
            assert answers_of(killed) == ["held"]
            end(killed)
            assert (root / LOCK).exists()
        several = [start(PROGRAM, root, time.time() + 1.0) for _ in range(5)]
        answers = answers_of(several)
        winner = several[answers.index("held")]
        answers.remove("held")
        # The winner may not have written its name yet.
        named = (f"process {winner.pid} on", f"a process that {LOCK} does not name")
        assert all(each.startswith(named) for each in answers)
        assert os.listdir(root) == [LOCK]
        end(several)


def test_a_link_is_refused(tmp_path):
    other = tmp_path / "other"
    other.write_text("somebody's")
    (tmp_path / LOCK).symlink_to(other)
    with pytest.raises(StoreError, match="regular file"):
        claim(tmp_path)
    assert other.read_text() == "somebody's"


def test_the_work_of_pods_that_are_gone_is_removed_by_a_run_that_has_the_lock(tmp_path):
    cut_short("torch", tmp_path)
    checkpoint = min(tmp_path.glob("step-*"))
    old = tmp_path / ".tmp-healcore-000000000000000a"
    inside = checkpoint / ".tmp-healcore-000000000000000b"
    foreign = tmp_path / ".tmp-somebody"
    for path in (old, inside, foreign):
        (path / "data").mkdir(parents=True)
    held = claim(tmp_path)
    with pytest.raises(StoreInUse):
        go_on("torch", tmp_path)
    assert old.exists(), "another run may be at work"
    held.release()
    go_on("torch", tmp_path)
    assert [path.exists() for path in (old, inside, foreign)] == [False, False, True]
