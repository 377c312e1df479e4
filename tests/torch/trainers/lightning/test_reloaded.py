"""A fit that makes a dataloader for each epoch, killed and started again."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from healcore import Checkpoints
from healcore.torch import LightningHealingCallback
from tests.torch.trainers.lightning.fits import Regression, data, trainer


class Reloaded(Regression):
    """Makes its dataloader, of another size in each epoch. Its process ends in step `killed_at`."""

    killed_at: int | None = None

    def train_dataloader(self) -> Any:
        return DataLoader(data(3 + self.trainer.current_epoch), 8, shuffle=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == self.killed_at:
            callback = self.trainer.callbacks[0]  # type: ignore[attr-defined]
            assert isinstance(callback, LightningHealingCallback)
            assert callback.healer
            callback.healer._live.saver.store.wait()
            os._exit(9)
        return super().training_step(batch, batch_idx)


def program(folder: Path, every: int, killed_at: int | None) -> None:
    torch.manual_seed(0)
    module = Reloaded()
    module.killed_at = killed_at
    callback = LightningHealingCallback(store=folder, checkpoints=Checkpoints(every=2))
    running = trainer(callback, max_epochs=4, reload_dataloaders_every_n_epochs=every)
    running.fit(module)
    torch.save((module.state_dict(), running.global_step, module.seen), folder / "out.pt")


def run(folder: Path, every: int, killed_at: int | None = None) -> int | None:
    process = multiprocessing.get_context("fork").Process(
        target=program, args=(folder, every, killed_at)
    )
    process.start()
    process.join(120)
    return process.exitcode


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks the killed processes")
@pytest.mark.parametrize(("every", "killed_at"), [(1, 6), (2, 11)])
def test_it_goes_on_with_the_dataloader_of_its_epoch(every: int, killed_at: int, tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert (run(whole, every), run(killed, every, killed_at), run(killed, every)) == (0, 9, 0)
    weights, steps, seen = torch.load(whole / "out.pt", weights_only=False)
    resumed, steps_after, rest = torch.load(killed / "out.pt", weights_only=False)
    assert steps_after == steps
    assert 0 < len(rest) < len(seen)
    assert rest == seen[-len(rest) :]
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
