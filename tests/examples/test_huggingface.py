"""The Hugging Face examples run unchanged on a CPU, and heal what is in their data."""

from __future__ import annotations

import re

from tests import forked_programs
from tests.forked_programs import TRANSFORMERS


def output(name: str) -> str:
    done = forked_programs.run(f"examples/{name}.py", imports=TRANSFORMERS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_hf_trainer():
    out = output("hf_trainer")
    assert "steps skipped: 3" in out  # the one NaN label, in each of three epochs
    assert "weights finite: True" in out
    loss = re.search(r"loss (\S+)$", out.strip())
    assert loss is not None
    assert float(loss[1]) < 1.0  # guessing the mean gives 8


def test_trl_sft():
    out = output("trl_sft")
    assert "steps skipped: 0" in out
    losses = re.search(r"loss (\S+) -> (\S+)$", out.strip())
    assert losses is not None
    assert float(losses[2]) < 0.5 * float(losses[1])
