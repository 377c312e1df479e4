"""A finished cell that is run again with other hyperparameters does not return the old model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from healcore.runtime.loop.start import StoreNotEmpty
from healcore.torch import LightningHealingCallback, heal_trainer
from tests.healer.run_directory import new_process
from tests.torch.trainers.huggingface.small_runs import calling, weights
from tests.torch.trainers.huggingface.small_runs import trainer as hf_trainer
from tests.torch.trainers.lightning.fits import Regression, data
from tests.torch.trainers.lightning.fits import trainer as lightning_trainer


def train_hf(folder: Path, **arguments: Any) -> Any:
    new_process()
    run = hf_trainer(folder, steps=8, **arguments)
    heal_trainer(run).train()
    return run


def fit(folder: Path, rate: float = 0.05, batch: int = 8, epochs: int = 1) -> Regression:
    new_process()
    torch.manual_seed(0)
    module = Regression(rate)
    callback = LightningHealingCallback(store=folder)
    running = lightning_trainer(callback, max_epochs=epochs)
    running.fit(module, DataLoader(data(), batch_size=batch))
    return module


def test_heal_of_a_trainer(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A callback ends the training at step 5 of 8, as EarlyStoppingCallback."""

    def stop(state: Any, *, control: Any, **_: Any) -> None:
        control.should_training_stop = True

    stops = {"callbacks": [calling("on_step_end", stop, at=5)]}
    caplog.set_level(logging.INFO, "healcore")
    first = train_hf(tmp_path, **stops)
    again = train_hf(tmp_path, **stops)
    assert torch.equal(weights(first), weights(again))
    assert "completed earlier, at step 5: nothing was trained" in caplog.text
    assert "other settings" not in caplog.text
    with pytest.raises(StoreNotEmpty, match=r"optimizer\.lr: 0\.01 -> 0\.5"):
        train_hf(tmp_path, learning_rate=0.5)
    with pytest.raises(StoreNotEmpty, match="per_device_train_batch_size: 4 -> 2"):
        train_hf(tmp_path, per_device_train_batch_size=2)
    assert train_hf(tmp_path, num_train_epochs=2).state.global_step == 16


def test_a_fit_of_lightning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    fit(tmp_path)
    caplog.set_level(logging.INFO, "healcore")
    caplog.clear()
    assert fit(tmp_path).seen == []
    assert "completed earlier, at step 8: nothing was trained" in caplog.text
    with pytest.raises(StoreNotEmpty, match=r"optimizer\.lr: 0\.05 -> 0\.5"):
        fit(tmp_path, rate=0.5)
    with pytest.raises(StoreNotEmpty, match=r"batch_size: 8 -> 16"):
        fit(tmp_path, batch=16)
    assert len(fit(tmp_path, epochs=2).seen) == 8
