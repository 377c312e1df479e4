"""The example is rolled back under DeepSpeed, and completes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="run by .ci/run with DeepSpeed on its path")

ROOT = Path(__file__).parents[2]


def test_example(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "examples/deepspeed_engine.py", str(tmp_path)],
        cwd=ROOT,
        env={
            **{name: value for name, value in os.environ.items() if "RANK" not in name},
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    match = re.search(r"^loss (\S+), steps (\d+), rollbacks (\d+)$", done.stdout, re.MULTILINE)
    assert match, done.stdout
    assert float(match[1]) < 0.45  # guessing the mean of sin() gives 0.5
    assert int(match[2]) == 400
    assert int(match[3]) >= 1
