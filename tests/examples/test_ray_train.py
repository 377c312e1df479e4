"""Ray Train restarts a killed worker's group, and the run ends with the bits of one left alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray.train", reason="run by .ci/run with Ray on its path")
ROOT = Path(__file__).parents[2]


def test_a_killed_worker_resumes(tmp_path: Path):
    ends = []
    for arguments in ([tmp_path / "left alone"], [tmp_path / "killed", 150]):
        command = [sys.executable, "examples/ray_train.py", *map(str, arguments)]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        ends.append(re.findall(r"^weights (\S+)$", done.stdout, re.MULTILINE))
    assert len(ends[0]) == 1
    assert ends[0] == ends[1]
    assert "resumes from the checkpoint of step" in done.stdout + done.stderr
