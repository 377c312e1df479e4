"""A program that forgets `zero_grad` for some steps; the large norm is only a symptom."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from healcore import Healer

EPOCHS = 18
FORGOTTEN = range(300, 345)
"""Steps without `zero_grad`, of 720."""


def final_loss(store: Path, forgotten: range) -> float:
    """Trains a small network with a Healer; returns its loss on unseen data."""
    torch.manual_seed(0)
    inputs, mixing = torch.randn(1280, 10), torch.randn(10, 3)
    targets = torch.tanh(inputs @ mixing) + 0.1 * torch.randn(1280, 3)
    unseen = torch.randn(300, 10)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)

    def loss_fn(batch: list[torch.Tensor]) -> torch.Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    state = {"model": model, "optimizer": optimizer}
    with Healer("default", state=state, store=store, loss_fn=loss_fn) as healer:
        for epoch in healer.epochs(EPOCHS):
            for batch in healer.batches(loader, epoch=epoch):
                step = healer.step
                healer.loss(batch).backward()
                optimizer.step()
                if step not in forgotten:
                    optimizer.zero_grad()
    with torch.no_grad():
        return functional.mse_loss(model(unseen), torch.tanh(unseen @ mixing)).item()


@pytest.mark.slow
def test_forgotten_zero_grad_is_healed_by_frozen_steps(tmp_path: Path):
    """A limit of the norm does not help, because the direction of the gradients is wrong."""
    without_fault = final_loss(tmp_path / "healthy", range(0))
    healed = final_loss(tmp_path / "healed", FORGOTTEN)
    assert healed < 1.5 * without_fault
