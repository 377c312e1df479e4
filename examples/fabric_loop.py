"""A Fabric loop that rolls back by itself: the lines that healcore adds are marked.

The learning rate warms up to a rate that is far too high, and the weights get worse. The Healer
compares them with earlier weights on the same batches, restores the earlier weights, and limits the
learning rate. Without healcore the run ends as NaN.

python examples/fabric_loop.py [DIRECTORY]
"""

from __future__ import annotations

import sys
import tempfile

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

import healcore  # <- healcore

STEPS, BATCH = 400, 64


def main(directory: str) -> None:
    """Train a small regression, and print how it went."""
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    torch.manual_seed(0)
    inputs = torch.randn(STEPS * BATCH, 8)
    targets = inputs.sum(dim=1, keepdim=True).sin() + 0.1 * torch.randn(len(inputs), 1)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=2.0, momentum=0.9))
    scheduler = LinearLR(optimizer, start_factor=0.01, total_iters=300)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=BATCH, shuffle=True)
    loader = fabric.setup_dataloaders(loader)
    loss = torch.zeros(())

    def loss_fn(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return (model(x) - y).square().mean()

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}  # <- healcore
    with healcore.Healer(  # <- healcore
        "default", state=state, store=directory, loss_fn=loss_fn
    ) as healer:
        for batch in healer.batches(loader):  # <- healcore
            loss = healer.loss(batch)  # <- healcore
            fabric.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        print(f"loss {loss.item():.3f}, steps {healer.step}, rollbacks {healer.rollbacks}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
