"""An exception within an accumulation: the fit that is started again is the fit without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from healcore.torch import LightningHealingCallback
from tests.torch.trainers.lightning.fits import Regression, data, trainer


class Raising(Regression):
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


def fit(store: Path, raises_at: int | None = None) -> tuple[Raising, Any]:
    torch.manual_seed(0)
    module = Raising(raises_at)
    callback = LightningHealingCallback(store=store, save_every=2)
    running = trainer(callback, max_epochs=2, accumulate_grad_batches=3)
    running.fit(module, StatefulDataLoader(data(7), batch_size=8, shuffle=True))
    return module, running


@pytest.mark.parametrize("at", [4, 8])
def test_after_an_exception_each_batch_is_used_by_one_step(at: int, tmp_path: Path):
    whole, expected = fit(tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path / "broken", at)
    again, running = fit(tmp_path / "broken")
    assert again.seen == whole.seen[at - at % 7 % 3 :]
    assert (running.global_step, running.current_epoch) == (expected.global_step, 2)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])


@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 5}])
def test_a_completed_fit_is_continued_as_if_it_had_not_ended(options: Any, tmp_path: Path):
    def fit(store: Path, epochs: int) -> tuple[Raising, Any]:
        torch.manual_seed(0)
        module = Raising(None)
        running = trainer(LightningHealingCallback(store=store), max_epochs=epochs, **options)
        running.fit(module, StatefulDataLoader(data(7), batch_size=8, shuffle=True))
        return module, running

    whole, expected = fit(tmp_path / "whole", 3)
    first, _ = fit(tmp_path / "continued", 2)
    again, running = fit(tmp_path / "continued", 3)
    assert [*first.seen, *again.seen] == whole.seen
    assert (running.global_step, running.current_epoch) == (expected.global_step, 3)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
