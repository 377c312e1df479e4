"""Ray Train restarts a killed worker's group, and the run ends with the bits of one left alone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_programs import ROOT

pytest.importorskip("ray.train", reason="run by make test-ray")


def test_a_killed_worker_resumes(tmp_path: Path):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # Ray is on it
    ends = []
    options = {"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": path}}
    options |= {"capture_output": True, "text": True, "timeout": 600}
    for arguments in ([tmp_path / "left alone"], [tmp_path / "killed", 150]):
        command = [sys.executable, "examples/ray_train.py", *map(str, arguments)]
        done = subprocess.run(command, check=False, **options)
        assert done.returncode == 0, done.stderr[-4000:]
        ends.append(re.findall(r"^weights (\S+)$", done.stdout, re.MULTILINE))
    assert len(ends[0]) == 1
    assert ends[0] == ends[1]
    assert "resumes from the checkpoint of step" in done.stdout + done.stderr
