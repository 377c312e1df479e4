"""The checks of a GPU still run, in their small form, within a time, and can fail."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_kit import __main__ as kit

pytestmark = [
    pytest.mark.slow,  # about our own benchmark
    pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the kit itself runs: make gpu"),
]
FOUND: dict[str, dict[str, Any]] = {
    "decisions": {"policies": ["default", "pretraining", "autoclip"], "steps": 40},
    "launches": {"tensors": 192},
    "grad_scaler": {"overflows": 1},
    "bfloat16": {"skips": 1},
    "rollback": {"skips": 1},
    "snapshots": {},
    "out_of_memory": {"samples": 800, "samples_in_a_part": 200, "failed_parts": 2},
    "protect": {"state": "same bits", "jax_device": "cpu"},
    "heal_zclip": {"state": "same bits", "jax_device": "cpu"},
    "jax_rollback": {"jax_device": "cpu"},
    "huggingface": {"steps": 40, "skips": 1},
    "fsdp2": {"engine": "host", "skips": 1},
    "cost_25M": {"rounds": 3},
}
"""What each check finds on a CPU."""


@pytest.mark.parametrize("name", [*kit.CHECKS, "cost_25M"])
def test_each_check_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kit, "CHECKS", {n: c._replace(limit_s=280) for n, c in kit.CHECKS.items()})
    found = kit.run(name, tmp_path, 300)
    assert found == {"outcome": "passed", **found, **FOUND[name]}
    if name == "launches":
        counts = found["dispatches"]
        print(f"operations of an eager step: {counts}")
        assert 0 < counts["nothing"] < counts["clip_grad_norm_"] < counts["zclip"]
    elif name.endswith("rollback"):
        assert found["rollbacks"] >= 1
    elif name == "snapshots":
        assert min(found["ratios_to_plain_copy"].values()) > 0
    elif name == "cost_25M":
        names = {each["name"] for each in found["torch"]["steps"]}
        assert {"adamw", "clip_grad_norm_ + adamw", "healcore default", "Healer default"} <= names


def test_all_checks_end_with_the_time(tmp_path: Path):
    """No check is left out silently, the largest come last, and the results name the device."""
    file = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu_kit", "--seconds", "1", "--json", str(file)]
    subprocess.run(command, check=True, timeout=300)
    result = json.loads(file.read_text())
    assert result["device"].startswith("CPU")
    checks = result["checks"]
    assert [*checks] == [*kit.CHECKS, "cost_25M"]
    assert all(each == {"outcome": "not run", "why": "no time left"} for each in checks.values())
    assert kit.TOTAL_S < 9 * 60
    assert [*kit.COST.values()] == sorted(kit.COST.values())
