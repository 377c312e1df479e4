"""A fit on two processes under DDP: python -m tests.torch.trainers.lightning.two_ranks FOLDER.

One rank's batch is NaN in step 5, and the rate warms up to one that is far too high.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from healcore.torch import LightningHealingCallback
from tests.torch.trainers.lightning.fits import Regression, data, trainer


class OneRankFails(Regression):
    """Has a NaN loss on rank 1 in step 5."""

    def loss(self, batch: Any) -> torch.Tensor:
        fails = self.trainer.global_step == 5 and self.trainer.global_rank == 1
        return super().loss(batch) * (float("nan") if fails else 1.0)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    module = OneRankFails(rate=4.0, warmup=150)
    callback = LightningHealingCallback(
        store=folder / "store", save_every=5, clip=None, rollback={"probation": 5}
    )
    running = trainer(callback, max_epochs=20, devices=2, strategy="ddp")
    running.fit(module, StatefulDataLoader(data(16), batch_size=8, shuffle=True))
    assert callback.healer is not None
    found = {
        "rollbacks": callback.healer.rollbacks,
        "step": (callback.healer.step, running.global_step),
        "skips": int(callback.healings["optimizer"].metrics()["heal/skips"]),
        "weights": module.state_dict(),
        "seen": [tuple(each) for each in module.seen],
    }
    torch.save(found, folder / f"rank{os.environ.get('LOCAL_RANK', 0)}.pt")
