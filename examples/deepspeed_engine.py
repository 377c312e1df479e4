"""A DeepSpeed engine that rolls back by itself: the lines that healcore adds are marked.

The learning rate warms up to a rate that is far too high, and the weights get worse. The Healer
compares them with earlier weights, restores the earlier weights, and limits the learning rate.
Without healcore the run ends as NaN.

python examples/deepspeed_engine.py [DIRECTORY]        (or with the deepspeed launcher)
"""

from __future__ import annotations

import os
import sys
import tempfile

import deepspeed  # pyright: ignore[reportMissingImports]
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

import healcore  # <- healcore
import healcore.torch  # <- healcore

STEPS, BATCH = 400, 64
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"}
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,  # SGD
    "gradient_clipping": 0.0,  # DeepSpeed's default is 1.0
}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(BATCH, 8)
    targets = inputs.sum(dim=1, keepdim=True).sin()
    return inputs, targets + 0.1 * torch.randn(BATCH, 1)


def main(directory: str) -> None:
    """Train a small regression, and print how it went."""
    if "RANK" not in os.environ:  # a launcher sets it
        os.environ.update(ALONE, MASTER_ADDR="127.0.0.1")
    torch.manual_seed(0)
    loader = [batch() for _ in range(STEPS)]
    model = nn.Sequential(
        nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9)
    scheduler = LinearLR(optimizer, start_factor=0.01, total_iters=300)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=CONFIG
    )
    loss = torch.zeros(())

    def loss_fn(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return (engine.module(x) - y).square().mean()

    state = healcore.torch.engine_state(engine)  # <- healcore
    with healcore.Healer(  # <- healcore
        "default", state=state, store=directory, loss_fn=loss_fn
    ) as healer:
        for x, y in healer.batches(loader):  # <- healcore
            loss = (engine(x) - y).square().mean()
            engine.backward(loss)
            engine.step()
        print(f"loss {loss.item():.3f}, steps {healer.step}, rollbacks {healer.rollbacks}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
