"""Several ranks of one Trainer decide together what to resume from.

A rank is `python -m tests.torch.trainers.huggingface.test_ranks RANK FOLDER PORT`. It prints the
step that it resumed from, and which checkpoints it has read.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from healcore.torch import HealingCallback
from healcore.torch.trainers.huggingface import checkpoints
from tests.torch.trainers.huggingface.small_runs import trainer
from tests.torch.two_ranks import free_port, run_two_ranks

pytestmark = pytest.mark.stress  # two processes that import transformers


def test_one_rank_reads_the_checkpoints(tmp_path: Path):
    """The newest one holds NaN: both ranks resume from the one before, and one rank reads them."""
    trainer(tmp_path, steps=10, save_strategy="steps", save_steps=5).train()
    newest = tmp_path / "checkpoint-10" / "model.safetensors"
    weights = load_file(newest)
    next(iter(weights.values()))[0] = math.nan
    save_file(weights, newest, {"format": "pt"})
    outputs = run_two_ranks(__name__, tmp_path, str(free_port()), seconds=120)
    results = [line.split() for out, _ in outputs for line in out.splitlines() if "result" in line]
    assert results == [
        ["result", "5", "12", "checkpoint-10,checkpoint-5"],
        ["result", "5", "12"],
    ], outputs


def resume(folder: Path) -> None:
    read, begun, find_defect = [], [], checkpoints.find_defect

    def counted(path: Path, *arguments: Any) -> str:
        read.append(path.name)
        return find_defect(path, *arguments)

    checkpoints.find_defect = counted
    run = trainer(folder, steps=24, callbacks=[HealingCallback()], ddp_backend="gloo", max_steps=12)
    assert run.args.world_size == 2
    own = run.training_step
    run.training_step = lambda *args: begun.append(run.state.global_step) or own(*args)
    run.train(resume_from_checkpoint=True)
    print("result", begun[0], run.state.global_step, ",".join(read))


if __name__ == "__main__":
    rank, port = sys.argv[1], sys.argv[3]
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    resume(Path(sys.argv[2]))
