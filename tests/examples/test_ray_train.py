"""Ray Train restarts a killed worker's group, and the run ends with the bits of one left alone."""

import re
from pathlib import Path

import pytest

from tests.events import processes

pytest.importorskip("ray.train", reason="run by .ci/run with Ray on its path")


def test_a_killed_worker_resumes(tmp_path: Path):
    ends = []
    for arguments in ([tmp_path / "left alone"], [tmp_path / "killed", 150]):
        done = processes.run("examples/ray_train.py", *arguments, seconds=600)
        assert done.returncode == 0, done.stderr[-4000:]
        ends.append(re.findall(r"^weights (\S+)$", done.stdout, re.MULTILINE))
    assert len(ends[0]) == 1
    assert ends[0] == ends[1]
    assert "resumes from the checkpoint of step" in done.stdout + done.stderr
