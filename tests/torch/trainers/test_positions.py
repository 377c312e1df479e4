"""An exception within an accumulation: the run that is started again is the run without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from healcore import Checkpoints
from healcore.torch import LightningHealingCallback, heal_trainer
from tests.torch.trainers.huggingface import small_runs
from tests.torch.trainers.lightning import fits


class RaisingTrainer(small_runs.InOrder):
    """A net with dropout; raises before the micro-batch of that number, from 0."""

    raises_at: int | None = None

    def training_step(self, model: Any, inputs: Any, items: Any = None) -> Any:
        seen = vars(self).setdefault("seen", [])
        seen.append(float(inputs["x"].sum()))
        if len(seen) - 1 == self.raises_at:
            raise ZeroDivisionError
        return super().training_step(model, inputs, items)


def train(folder: Path, accumulated: int, raises_at: int | None = None) -> Any:
    """Two epochs of 7 batches, so that the last window of an epoch may be a shorter one."""
    made: Any = small_runs.trainer(
        folder, cls=RaisingTrainer, num_train_epochs=2, gradient_accumulation_steps=accumulated
    )
    made.model.layers.insert(1, torch.nn.Dropout(0.2))
    made.train_dataset, made.raises_at = small_runs.Rows(7), raises_at
    heal_trainer(made, store=folder / "store", checkpoints=Checkpoints(every=2)).train()
    return made


@pytest.mark.parametrize(("accumulated", "at"), [(3, 4), (3, 9), (2, 7)])
def test_each_batch_of_a_trainer_is_used_by_one_step(
    accumulated: int, at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    whole = train(tmp_path / "whole", accumulated)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "broken", accumulated, at)
    again = train(tmp_path / "broken", accumulated)
    first = at - at % 7 % accumulated
    assert again.seen == whole.seen[first:]
    assert torch.equal(small_runs.weights(again), small_runs.weights(whole))
    assert (again.state.global_step, again.state.epoch) == (whole.state.global_step, 2.0)
    assert small_runs.logged(again, "loss") == small_runs.logged(whole, "loss")
    if at == 4:  # the other windows begin where a checkpoint is
        assert "come again after a restart" in capsys.readouterr().err


class RaisingModule(fits.Regression):
    """Has dropout; raises in the training step of that number, from 0."""

    def __init__(self, raises_at: int | None) -> None:
        super().__init__()
        self.net.insert(1, torch.nn.Dropout(0.2))
        self.raises_at = raises_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if len(self.seen) - 1 == self.raises_at:
            raise ZeroDivisionError
        return loss


def fit(
    store: Path, loader: Any, raises_at: int | None = None, **options: Any
) -> tuple[RaisingModule, Any]:
    torch.manual_seed(0)
    module = RaisingModule(raises_at)
    callback = LightningHealingCallback(store=store, checkpoints=Checkpoints(every=2))
    running = fits.trainer(callback, max_epochs=2, accumulate_grad_batches=3)
    running.fit(module, loader(fits.data(7), batch_size=8, shuffle=True, **options))
    return module, running


@pytest.mark.parametrize(
    ("at", "loader", "workers"),
    [
        *((4, StatefulDataLoader, 0), (8, StatefulDataLoader, 0)),
        *((0, DataLoader, 0), (4, DataLoader, 0), (8, DataLoader, 1)),
    ],
)
def test_each_batch_of_a_fit_is_used_by_one_step(
    at: int, loader: Any, workers: int, tmp_path: Path
):
    options: Any = {"num_workers": workers, "persistent_workers": workers > 0}
    whole, expected = fit(tmp_path / "whole", loader, **options)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path / "broken", loader, at, **options)
    again, running = fit(tmp_path / "broken", loader, **options)
    assert again.seen == whole.seen[at - at % 7 % 3 :]
    assert (running.global_step, running.current_epoch) == (expected.global_step, 2)
    assert all(map(torch.equal, whole.parameters(), again.parameters()))
