"""A Lightning Trainer that rolls back by itself: the lines that healcore adds are marked.

The learning rate warms up to a rate that is far too high, and the weights get worse. healcore
compares them with earlier weights. Within the running fit it restores these, the schedule,
Lightning's counters and the data, and limits the learning rate. Without healcore it ends as NaN.

python examples/lightning_trainer.py [DIRECTORY]
"""

from __future__ import annotations

import sys
import tempfile

import lightning
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from healcore.torch import LightningHealingCallback  # <- healcore

EPOCHS, BATCHES, BATCH = 4, 100, 64


class Regression(lightning.LightningModule):
    """Learns the sine of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )

    def loss(self, batch):
        x, y = batch
        return (self.net(x) - y).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=2.0, momentum=0.9)
        scheduler = LinearLR(optimizer, start_factor=0.01, total_iters=300)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main(directory: str) -> None:
    """Train a small regression, and print how it went."""
    lightning.seed_everything(0)
    inputs = torch.randn(BATCHES * BATCH, 8)
    targets = inputs.sum(dim=1, keepdim=True).sin() + 0.1 * torch.randn(len(inputs), 1)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=BATCH, shuffle=True)
    module = Regression()
    healing = LightningHealingCallback(  # <- healcore
        "default", store=directory, loss_fn=module.loss
    )
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        callbacks=[healing],  # <- healcore
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    rollbacks = healing.healer.rollbacks if healing.healer else 0
    loss = trainer.callback_metrics["loss"].item()
    print(f"loss {loss:.3f}, steps {trainer.global_step}, rollbacks {rollbacks}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else folder)
