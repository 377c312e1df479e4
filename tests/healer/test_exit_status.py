"""The same command, started again and again by a scheduler: its output and its exit status."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from healcore.runtime.store.claim import LOCK
from tests import forked_programs
from tests.healer.run_directory import postmortems
from tests.runtime.store.disk_faults import small_disk

TORCHRUN = "tests.healer.torchrun_worker"


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
    nothing_is_done(tmp_path, TORCHRUN, "examples.torch_healer", tmp_path)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_disk_that_is_full_at_the_end_is_no_completed_run(framework, tmp_path):
    with small_disk(tmp_path / "disk", 16) as disk:
        full = start("tests.healer.full_disk_run", framework, disk, 29)
        assert full.returncode == 1, full.stderr
        assert full.stdout == ""
        # Orbax's thread prints a traceback of its own, before it.
        line = full.stderr.splitlines()[-1]
        assert line.startswith("healcore: the loop has ended at step 30, and its last state is not")
        # 24 where the disk was full before the save of 28 had reached it.
        assert re.search("it resumes from the checkpoint of step (24|28)", full.stderr)
        (disk / "filler").unlink()
        again = start("tests.healer.full_disk_run", framework, disk, 0)
        assert again.returncode == 0, again.stderr
        assert "healcore: resumes from the checkpoint of step" in again.stderr
        assert again.stdout == "trained to 30\n"
        endings = [found["ending"] for found in postmortems(disk / "run")]
        assert endings[-1] == "completed"
        nothing_is_done(disk / "run", "tests.healer.full_disk_run", framework, disk, 0)
