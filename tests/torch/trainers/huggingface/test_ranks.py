"""Two ranks of one Trainer without a store skip the same step, and resume from its checkpoint.

A rank is `python -m tests.torch.trainers.huggingface.test_ranks RANK FOLDER PORT`.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from healcore.torch import HealingCallback
from tests.torch.trainers.huggingface.small_runs import counts, trainer, weights
from tests.torch.two_ranks import free_port, run_two_ranks

pytestmark = pytest.mark.stress  # two processes that import transformers


def test_two_ranks_decide_together(tmp_path: Path):
    outputs = run_two_ranks(__name__, tmp_path, str(free_port()), seconds=120)
    results = [line for out, _ in outputs for line in out.splitlines() if "result" in line]
    assert len(set(results)) == 1, outputs
    assert results[0].startswith("result 12 1.0 6 True")


def train(folder: Path, resume: bool) -> Any:
    callback = HealingCallback()
    arguments = {"ddp_backend": "gloo", "save_strategy": "steps", "save_steps": 6}
    # The ranks take the batches in turn, so only rank 0 has the NaN.
    run = trainer(folder, steps=24, scaled={4: math.nan}, callbacks=[callback], **arguments)
    assert run.args.world_size == 2
    first: list[int] = []
    own = run.training_step
    run.training_step = lambda *args: first.append(run.state.global_step) or own(*args)
    run.train(resume_from_checkpoint=str(folder / "checkpoint-6") if resume else None)
    return run, callback, first[0]


if __name__ == "__main__":
    rank, path, port = sys.argv[1:]
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    whole, _, _ = train(Path(path), False)
    again, callback, begun = train(Path(path), True)
    same = bool((weights(whole) == weights(again)).all())
    print("result", again.state.global_step, *counts(callback, "skips"), begun, same)
