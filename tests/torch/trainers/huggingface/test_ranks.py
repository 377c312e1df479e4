"""Several ranks of one Trainer decide together what to resume from."""

from __future__ import annotations

import math
import socket
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.torch.trainers.huggingface.small_runs import trainer
from tests.torch.two_ranks import run_two_ranks

pytestmark = pytest.mark.stress  # two processes that import transformers


def test_one_rank_reads_the_checkpoints(tmp_path: Path):
    """The newest one holds NaN: both ranks resume from the one before, and one rank reads them."""
    trainer(tmp_path, steps=10, save_strategy="steps", save_steps=5).train()
    newest = tmp_path / "checkpoint-10" / "model.safetensors"
    weights = load_file(newest)
    next(iter(weights.values()))[0] = math.nan
    save_file(weights, newest, {"format": "pt"})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    module = "tests.torch.trainers.huggingface.resuming_rank"
    outputs = run_two_ranks(module, tmp_path, str(port), seconds=120)
    results = [line.split() for out, _ in outputs for line in out.splitlines() if "result" in line]
    assert results == [
        ["result", "5", "12", "checkpoint-10,checkpoint-5"],
        ["result", "5", "12"],
    ], outputs
    assert (tmp_path / "_healcore" / "checkpoint-10").is_dir()
