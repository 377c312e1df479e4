"""Two processes under DDP skip and go back together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[4]


@pytest.mark.stress
def test_two_processes_go_back_together(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.torch.trainers.lightning.two_ranks", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert first["rollbacks"] == second["rollbacks"] > 0
    assert first["step"] == second["step"] == (160, 160)
    assert first["skips"] == second["skips"] > 0, "a NaN on one rank skips the step on both"
    where = [[each[:3] for each in found["seen"]] for found in (first, second)]
    assert where[0] == where[1]
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name])
        assert weight.isfinite().all()
