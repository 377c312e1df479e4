"""A store that holds a completed run does not give its weights to another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from healcore.errors import AlreadyCompleted, StoreNotEmpty
from healcore.torch import LightningHealingCallback, heal_trainer
from tests.healer.run_directory import new_process
from tests.healer.training_loops import Faults, loop_of, rules, train
from tests.torch.trainers.lightning.fits import Regression
from tests.torch.trainers.test_changed_settings import data, hf_trainer, lightning_trainer

RULES = rules()


def healer(framework: str) -> Any:
    def run(folder: Path, seed: int) -> Any:
        loop = loop_of(framework, Faults(), RULES)
        if framework == "torch":
            torch.manual_seed(seed)
            for each in loop.model.parameters():
                torch.nn.init.normal_(each)
        else:
            params = {name: each + seed for name, each in loop.state["params"].items()}
            loop.state = {**loop.state, "params": params}
        train(loop, RULES, range(12), store=folder)

    return run


def trainer(folder: Path, seed: int) -> None:
    run = hf_trainer(folder, steps=4)
    torch.manual_seed(seed)
    torch.nn.init.normal_(next(run.model.parameters()))
    heal_trainer(run, "default").train()


def lightning(folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    module = Regression(0.1)
    callback = LightningHealingCallback(store=folder)
    lightning_trainer(callback, max_epochs=1).fit(module, DataLoader(data(), batch_size=8))


@pytest.mark.parametrize(
    "run", [healer("torch"), healer("jax"), trainer, lightning], ids=["torch", "jax", "hf", "pl"]
)
def test_a_completed_store_is_of_one_run(run: Any, tmp_path: Path):
    run(tmp_path, 0)
    for seed in (1, 0):  # a fold, and the same run again
        with pytest.raises(StoreNotEmpty, match=r"this process has completed.*runs/{fold}"):
            run(tmp_path, seed)
    new_process()
    with pytest.raises(StoreNotEmpty, match="began with other weights than this program"):
        run(tmp_path, 1)
    if run in (trainer, lightning):
        run(tmp_path, 0)
    else:
        with pytest.raises(AlreadyCompleted):
            run(tmp_path, 0)
