"""A training script that kills itself after a step: `killed_run.py FOLDER STEP`; 0: never."""

from __future__ import annotations

import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from healcore.torch import HealingCallback
from tests.torch.trainers.huggingface.small_runs import trainer, weights

POLICY = {
    "respond": [{"to": ["nonfinite"], "do": ["skip", "cut_lr"]}],
    "lr": {"factor": 0.5, "hold_steps": 1000, "ceiling": 1.0},
}


class Kills(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, step: int) -> None:
    callback = HealingCallback(**POLICY)
    run = trainer(
        folder,
        scaled={12: math.nan},
        callbacks=[callback, Kills(step)],
        save_strategy="steps",
        save_steps=10,
        lr_scheduler_type="constant",
    )
    folder.mkdir(exist_ok=True)
    run.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) is not None)
    report = callback.report()
    assert report is not None
    total = weights(run).double().sum().item()
    print(f"end {total!r} {report.counts['skips']} {report.lr_scale} {report.ending}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
