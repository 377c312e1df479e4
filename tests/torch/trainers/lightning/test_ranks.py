"""Two processes under DDP skip and roll back together.

`python -m tests.torch.trainers.lightning.test_ranks FOLDER` is the fit; Lightning starts the second
process. One rank's batch is NaN in step 5, and the rate warms up to one that is far too high.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from healcore import Checkpoints
from healcore.torch import LightningHealingCallback
from tests.torch.trainers.lightning.fits import Regression, data, trainer
from tests.torch.two_ranks import ROOT


class OneRankFails(Regression):
    """Has a NaN loss on rank 1 in step 5."""

    def loss(self, batch: Any) -> torch.Tensor:
        fails = self.trainer.global_step == 5 and self.trainer.global_rank == 1
        return super().loss(batch) * (float("nan") if fails else 1.0)


@pytest.mark.stress
def test_two_processes_go_back_together(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert first["rollbacks"] == second["rollbacks"] > 0
    skipped = Counter(epoch for epoch, _ in first["left_out"])
    # Lightning does not count an epoch whose 8 batches are all skipped: another one replaces it.
    steps = 160 - sum(count for count in skipped.values() if count < 8)
    assert first["step"] == second["step"] == (steps, steps)
    assert first["skips"] == second["skips"] > 0, "a NaN on one rank skips the step on both"
    where = [[each[:3] for each in found["seen"]] for found in (first, second)]
    assert where[0] == where[1]
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name])
        assert weight.isfinite().all()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    module = OneRankFails(rate=4.0, warmup=150)
    callback = LightningHealingCallback(
        store=folder / "store",
        checkpoints=Checkpoints(every=5),
        clip=None,
        rollback={"probation": 5},
    )
    running = trainer(callback, max_epochs=20, devices=2, strategy="ddp")
    running.fit(module, StatefulDataLoader(data(16), batch_size=8, shuffle=True))
    assert callback.healer is not None
    found = {
        "rollbacks": callback.healer.rollbacks,
        "left_out": [tuple(each) for each in callback.healer.skipped_batch_ids],
        "step": (callback.healer.step, running.global_step),
        "skips": int(callback.healings["optimizer"].metrics()["heal/skips"]),
        "weights": module.state_dict(),
        "seen": [tuple(each) for each in module.seen],
    }
    torch.save(found, folder / f"rank{os.environ.get('LOCAL_RANK', 0)}.pt")
