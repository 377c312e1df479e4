"""One run at a time in a directory, with real processes."""

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from healcore.runtime.store.claim import LOCK, Claim, StoreInUse
from tests.forked_programs import ROOT, ForkedProgram
from tests.hostile.run_directories import cut_short, go_on

CLAIMS = """
import sys, time
from healcore.runtime.store.claim import Claim, StoreInUse
time.sleep(max(0.0, float(sys.argv[2]) - time.time()))
try:
    held = Claim(sys.argv[1])
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
        Claim(tmp_path)
    holder.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # a zombie is as good as gone
    held = Claim(tmp_path)
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
    held = Claim(tmp_path)
    with pytest.raises(StoreInUse):
        go_on("torch", tmp_path)
    assert old.exists(), "another run may be at work"
    held.release()
    go_on("torch", tmp_path)
    assert not old.parent.exists()
