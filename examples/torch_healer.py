"""A torch loop that goes back by itself: the lines that healcore adds are marked.

Twelve batches in a row are ruined. The first ones are skipped; at the tenth the run goes back to a
checkpoint that is known to be good, halves its learning rate, and leaves the bad batches out.

python examples/torch_healer.py [DIRECTORY]
"""

from __future__ import annotations

import sys
import tempfile

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

import healcore  # <- healcore

STEPS, BATCH = 400, 64
RUINED = range(250, 262)


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(BATCH, 8)
    targets = inputs.sum(dim=1, keepdim=True).sin()
    return inputs, targets * float("nan") if index in RUINED else targets


def main(directory: str) -> None:
    """Train a small regression, and print how it went."""
    torch.manual_seed(0)
    # A list can be put back to any batch, and so can torchdata's StatefulDataLoader. A plain
    # DataLoader cannot: it goes on forward, which leaves the bad batches behind as well.
    loader = [batch(index) for index in range(STEPS)]
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = CosineAnnealingLR(optimizer, STEPS)
    loss = torch.zeros(())
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}  # <- healcore
    with healcore.Healer("default", state=state, store=directory) as healer:  # <- healcore
        for x, y in healer.batches(loader):  # <- healcore
            loss = (model(x) - y).square().mean()
            healer.observe(loss)  # <- healcore
            loss.backward()
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
