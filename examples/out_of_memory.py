"""A torch loop that continues when memory runs out: the lines that healcore adds are marked.

The device here has memory for eight samples at a time, and the batches have 32. The first step is
repeated with 16 at a time, then with eight; later steps begin with eight. The gradients are the
gradients of whole batches. Without healcore the first step ends the program.

python examples/out_of_memory.py
"""

from __future__ import annotations

import torch
from torch import nn

import healcore  # <- healcore

STEPS, BATCH, FITS = 200, 32, 8


class Model(nn.Sequential):
    """A model on a device that has memory for `FITS` samples."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training and len(inputs) > FITS:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(inputs)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(BATCH, 8)
    return inputs, inputs.sum(dim=1, keepdim=True).sin()


def main() -> None:
    """Train a small regression, and print how it went."""
    torch.manual_seed(0)
    loader = [batch() for _ in range(STEPS)]
    model = Model(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sizes: list[int] = []
    state = {"model": model, "optimizer": optimizer}
    with healcore.Healer("default", state=state) as healer:  # <- healcore
        for whole in healer.batches(loader):  # <- healcore
            for part in healer.microbatches(whole):  # <- healcore
                with part:  # <- healcore
                    x, y = part.batch  # <- healcore
                    loss = (model(x) - y).square().mean()
                    healer.observe(loss)  # <- healcore
                    (loss * part.weight).backward()  # <- healcore: part.weight
                    sizes.append(len(x))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        x, y = batch()
        loss = (model(x) - y).square().mean().item()
        print(f"loss {loss:.3f}, steps {healer.step}, largest part {max(sizes)}")


if __name__ == "__main__":
    main()
