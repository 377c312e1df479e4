"""The Hugging Face examples run unchanged on a CPU, and heal what is in their data."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def output(name: str) -> str:
    done = subprocess.run(
        [sys.executable, f"examples/{name}.py"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_hf_trainer():
    out = output("hf_trainer")
    assert "skips 3" in out  # the one NaN label, in each of three epochs
    assert "weights finite: True" in out
    loss = re.search(r"loss (\S+)$", out.strip())
    assert loss is not None
    assert float(loss[1]) < 1.0  # guessing the mean gives 8


def test_trl_sft():
    out = output("trl_sft")
    assert re.search(r"'heal/skips': '?[1-9]", out) is None
    losses = re.search(r"loss (\S+) -> (\S+)$", out.strip())
    assert losses is not None
    assert float(losses[2]) < 0.5 * float(losses[1])
