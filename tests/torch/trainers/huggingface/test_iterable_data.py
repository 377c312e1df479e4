"""`heal(trainer)` on an IterableDataset: one that begins again, and one that can be read once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from healcore.torch import HealingCallback
from tests.healer.run_options import grouped
from tests.torch.trainers.huggingface import small_runs
from tests.torch.trainers.huggingface.small_runs import BATCH, Rows, calling, raising, weights

POLICY = {
    "save_every": 5,
    "rollback": {"probation": 3, "confirm": False, "skip_batches": 0},
    "respond": [{"to": ["nonfinite"], "do": ["skip", "rollback"]}],
    "clip": None,
}


class Stream(IterableDataset):
    """The rows of some batches; `once`: a generator that is never made again.

    The batch `bad` is bad in the first pass only.
    """

    def __init__(self, batches: int, bad: int | None, *, once: bool) -> None:
        rows = Rows(batches, {} if bad is None else {bad: math.nan})
        self.rows, self.once, self.read = rows, once, []
        self.left = self.all()

    def all(self) -> Iterator[Any]:
        rows, self.rows = self.rows, Rows(len(self.rows) // BATCH)
        for index in range(len(rows)):
            self.read.append(index // BATCH)
            yield rows[index]

    def __iter__(self) -> Iterator[Any]:
        yield from self.left if self.once else self.all()


def run(folder: Path, *, once: bool, bad: int | None = None, callbacks: Any = ()) -> Any:
    trainer = small_runs.trainer(
        folder,
        cls=small_runs.Recording,
        callbacks=[HealingCallback(store=folder / "store", **grouped(POLICY)), *callbacks],
        max_steps=30,
        max_grad_norm=0.0,
        # Where one process reads for all, accelerate itself raises at the end of the data.
        accelerator_config={"dispatch_batches": False},
    )
    trainer.train_dataset = Stream(20, bad, once=once)
    trainer.train()
    trainer.seen = [batch for _, batch in trainer.seen]
    return trainer


@pytest.mark.parametrize("once", [False, True])
def test_after_a_rollback(once: bool, tmp_path: Path):
    """The data continue forward, and lose none."""
    trainer = run(tmp_path, once=once, bad=12)
    assert trainer.seen[:20] == list(range(20))
    assert trainer.state.global_step == (20 - 9 if once else 30), "from step 14 back to 5"
    assert weights(trainer).isfinite().all()


def test_after_a_restart(tmp_path: Path):
    """The data are read from their start, and the used batches are dropped."""
    fails = calling("on_step_end", raising(RuntimeError("stop")), at=7)
    with pytest.raises(RuntimeError, match="stop"):
        run(tmp_path, once=False, callbacks=[fails])
    again = run(tmp_path, once=False)
    assert again.seen == [*range(5, 20), *range(10)]  # from the checkpoint of step 5
    assert torch.equal(weights(again), weights(run(tmp_path / "whole", once=False)))
