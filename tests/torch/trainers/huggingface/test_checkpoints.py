"""A damaged checkpoint of a real Trainer is never the one to resume from."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers.trainer_utils import get_last_checkpoint

from healcore.torch import HealingCallback
from tests.torch.trainers.huggingface.small_runs import calling, trainer, weights

SAVES = {"save_strategy": "steps", "save_steps": 10}
FILES = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors")


def test_what_a_kill_cut_off_is_not_resumed_from(tmp_path: Path):
    first = trainer(tmp_path, callbacks=[HealingCallback()], **SAVES)
    first.train()
    (tmp_path / "checkpoint-40" / "trainer_state.json").unlink()
    shutil.copytree(tmp_path / "checkpoint-30", tmp_path / "checkpoint-50")
    state = tmp_path / "checkpoint-50" / "trainer_state.json"
    state.write_text(state.read_text()[:100])
    (tmp_path / "checkpoint-60").mkdir()
    again = trainer(tmp_path, callbacks=[HealingCallback()], **SAVES)
    resumed: list[int] = []
    begin = lambda state, **_: resumed.append(state.global_step)  # noqa: E731
    again.add_callback(calling("on_train_begin", begin))
    again.train(resume_from_checkpoint=True)
    assert resumed == [30]
    assert torch.equal(weights(again), weights(first))


@pytest.mark.parametrize(("name", "kept"), [*((name, 0.5) for name in FILES), (FILES[0], None)])
def test_a_checkpoint_with_a_damaged_file_gives_way_to_the_older_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kept: float | None
):
    first = trainer(tmp_path, callbacks=[HealingCallback()], steps=20, **SAVES)
    first.train()
    path = tmp_path / "checkpoint-20" / name
    os.truncate(path, int(path.stat().st_size * (kept or 0)))
    if kept is None:
        path.unlink()
    again = trainer(tmp_path, callbacks=[HealingCallback()], steps=20, **SAVES)
    again.train(resume_from_checkpoint=True)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "not resume from" in line]
    assert name in line
    assert torch.equal(weights(again), weights(first))


def test_a_checkpoint_of_an_unhealed_run_with_nan_is_not_resumed_from(tmp_path: Path):
    sick = trainer(tmp_path, scaled={25: math.nan}, **SAVES)
    sick.train()
    again = trainer(tmp_path, scaled={25: math.nan}, callbacks=[HealingCallback()], **SAVES)
    # As HF's example scripts do, which ask before there is a Trainer.
    again.train(resume_from_checkpoint=get_last_checkpoint(str(tmp_path)))
    assert weights(again).isfinite().all()
    assert again.state.global_step == 40
