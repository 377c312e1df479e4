"""A killed run continues with the same command, with healcore's state.

`python -m tests.torch.trainers.huggingface.test_resume FOLDER STEP` kills itself after a step, or
never with 0.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.trainer_utils import get_last_checkpoint

from healcore.torch import HealingCallback
from tests import forked_programs
from tests.forked_programs import TRANSFORMERS
from tests.torch.trainers.huggingface.small_runs import (
    Steps,
    calling,
    counts,
    trainer,
    weights,
)

SAVES = {"save_strategy": "steps", "save_steps": 10}
POLICY = {
    "respond": [{"to": ["nonfinite"], "do": ["skip", "cut_lr"]}],
    "lr": {"factor": 0.5, "hold_steps": 1000, "ceiling": 1.0},
}


def main(folder: Path, step: int) -> None:
    callback = HealingCallback(**POLICY)
    kills = calling("on_step_end", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL), at=step)
    run = trainer(
        folder,
        scaled={12: math.nan},
        callbacks=[callback, kills],
        save_strategy="steps",
        save_steps=10,
        lr_scheduler_type="constant",
    )
    folder.mkdir(exist_ok=True)
    run.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) is not None)
    total = weights(run).double().sum().item()
    print("end", repr(total), *counts(callback, "skips", "lr_scale"))


def started(folder: Path, step: int) -> subprocess.CompletedProcess[str]:
    return forked_programs.run("-m", __name__, folder, step, imports=TRANSFORMERS)


def test_kill_9_and_the_same_command_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    killed = started(tmp_path / "killed", 27)
    assert killed.returncode == -9, killed.stderr
    again = started(tmp_path / "killed", 0)
    main(tmp_path / "whole", 0)
    end = again.stdout.splitlines()[-1]
    # The cut of step 13 and its count have survived, and every weight is the same.
    assert end == capsys.readouterr().out.splitlines()[-1]
    assert end.endswith("1.0 0.5")


@pytest.mark.parametrize("restored", [False, True])
def test_the_lr_multiplier_survives_hfs_restore(tmp_path: Path, restored: bool):
    """Measured by parameter displacement; with and without HF's restore of callbacks."""
    arguments = {
        "optim": "sgd",
        "max_grad_norm": 1e-3,  # every step is clipped to it, and so moves as far
        "lr_scheduler_type": "constant",
        "restore_callback_states_from_checkpoint": restored,
        **SAVES,
    }
    first = trainer(
        tmp_path, scaled={12: math.nan}, callbacks=[HealingCallback(**POLICY)], **arguments
    )
    first.train()
    steps = Steps()
    callback = HealingCallback(**POLICY)
    again = trainer(tmp_path, scaled={12: math.nan}, callbacks=[callback, steps], **arguments)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-20"))
    moved = dict(zip(steps.steps, steps.moved, strict=True))
    assert moved[21] == pytest.approx(0.5e-2 * 1e-3, rel=0.01)
    live = [e for e in again.callback_handler.callbacks if isinstance(e, HealingCallback)]
    assert len(live) == 1
    assert counts(live[0], "lr_scale", "skips") == [0.5, 1]
    assert torch.equal(weights(first), weights(again))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
