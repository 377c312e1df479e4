"""The checks of a GPU still run, in their small form, and a failing one is reported as failed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_kit.__main__ import CHECKS, run

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with CUDA the kit itself runs: make gpu"
)


def kit(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "benchmarks.gpu_kit", *map(str, arguments)]
    return subprocess.run(program, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_each_check_runs(name: str, tmp_path: Path):
    found = run(name, tmp_path, 300)
    needs_cuda = name in ("cuda_graph", "out_of_memory")
    assert found["outcome"] == ("skipped" if needs_cuda else "passed"), found


def test_the_results_name_the_device(tmp_path: Path):
    file = tmp_path / "gpu.json"
    done = kit("--json", file, "bfloat16", "cuda_graph")
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert result["device"].startswith("CPU")
    assert [each["outcome"] for each in result["checks"].values()] == ["passed", "skipped"]


def test_a_check_that_fails_or_does_not_end_has_failed(tmp_path: Path):
    found = run("decisions", tmp_path, 0.1)
    assert found["outcome"] == "failed"
    assert "not done" in found["error"]
    done = kit("no_such_check")
    assert done.returncode == 2
