"""Two processes with one sharded model: the same word on both, and the same way back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_two_ranks_go_back_together(tmp_path):
    script = [sys.executable, "-m", "tests.healer.torch.two_ranks"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [*script, str(rank), str(tmp_path / "meeting"), str(tmp_path / "checkpoints")],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outcomes = [process.communicate(timeout=600) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [out for out, _ in outcomes] == ["fine\n", "fine\n"], outcomes
