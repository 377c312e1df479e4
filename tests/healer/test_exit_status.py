"""The same command, started again and again by a scheduler: its output and its exit status.

This file is a program too, of a run whose disk fills up at a step (0: never): `python -m
tests.healer.test_exit_status FRAMEWORK FOLDER STEP`. With `torchrun MODULE ARGUMENT` it calls the
main function of a module as torchrun calls a worker.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import record

from healcore import Checkpoints, Healer
from healcore.runtime.store import Keep
from healcore.runtime.store.claim import LOCK
from tests import forked_programs
from tests.healer.run_directory import postmortems
from tests.healer.training_loops import loop_of, rules
from tests.runtime.store.disk_faults import small_disk

PROGRAM = "tests.healer.test_exit_status"


def start(*arguments: object) -> subprocess.CompletedProcess[str]:
    return forked_programs.run("-m", *arguments, timeout=1800)


def nothing_is_done(run: Path, *program: object) -> None:
    """Starts a program again whose run has completed."""
    files = sorted(each for each in run.rglob("*") if each.is_file() and each.name != LOCK)
    contents = [each.read_bytes() for each in files]
    again = start(*program)
    assert again.returncode == 0, again.stderr
    assert "Traceback" not in again.stderr
    assert again.stdout == ""
    (line,) = (line for line in again.stderr.splitlines() if line.startswith("healcore: "))
    assert f"nothing to do: {run} holds a run that completed at step" in line
    assert "resume=True" in line
    assert [each.read_bytes() for each in files] == contents, "and nothing was touched"


def test_after_a_completed_run_there_is_nothing_to_do_for_a_worker_of_torchrun(tmp_path):
    first = start("examples.torch_healer", tmp_path)
    assert first.returncode == 0, first.stderr
    nothing_is_done(tmp_path, PROGRAM, "torchrun", "examples.torch_healer", tmp_path)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_disk_that_is_full_at_the_end_is_no_completed_run(framework, tmp_path):
    with small_disk(tmp_path / "disk", 16) as disk:
        full = start(PROGRAM, framework, disk, 29)
        assert full.returncode == 1, full.stderr
        assert full.stdout == ""
        # Not always the last line: Orbax's thread prints a traceback of its own.
        assert "\nhealcore: the loop has ended at step 30, and its last state is not" in full.stderr
        # 24 where the disk was full before the save of 28 had reached it.
        assert re.search("it resumes from the checkpoint of step (24|28)", full.stderr)
        (disk / "filler").unlink()
        again = start(PROGRAM, framework, disk, 0)
        assert again.returncode == 0, again.stderr
        assert "healcore: resumes from the checkpoint of step" in again.stderr
        assert again.stdout == "trained to 30\n"
        endings = [found["ending"] for found in postmortems(disk / "run")]
        assert endings[-1] == "completed"
        nothing_is_done(disk / "run", PROGRAM, framework, disk, 0)


LEFT = 8192
"""Bytes that stay free: enough for a record, too few for a checkpoint."""


def fill(folder: Path) -> None:
    file, taken = os.open(folder / "filler", os.O_CREAT | os.O_WRONLY), 0
    try:
        while True:
            taken += os.write(file, bytes(4096))
    except OSError:
        os.ftruncate(file, max(0, taken - LEFT))
    finally:
        os.close(file)


def trains(framework: str, folder: Path, full_at: int) -> None:
    policy = rules()
    loop = loop_of(framework, policy=policy)
    keep = Keep(good=50, candidates=50)  # nothing is deleted, which would make room
    store = folder / "run"
    with Healer(
        policy, state=loop.state, store=store, checkpoints=Checkpoints(keep=keep)
    ) as healer:
        for number in healer.batches(list(range(30))):
            if full_at and number == full_at:
                healer._loop.saver.store.wait()  # a save that fails would free its part of the disk
                fill(folder)
            loop.step(healer, number)
    print(f"trained to {healer.step}")


if __name__ == "__main__":
    if sys.argv[1] == "torchrun":
        record(importlib.import_module(sys.argv[2]).main)(sys.argv[3])
    else:
        trains(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
