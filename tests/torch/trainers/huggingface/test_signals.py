"""The loss and the gradient norm that a policy sees of a Trainer are those before HF's changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from healcore.torch import HealingCallback
from tests.torch.trainers.huggingface import small_runs
from tests.torch.trainers.huggingface.small_runs import counts


def test_a_token_mean_over_uneven_micro_batches_is_seen_as_such(tmp_path: Path):
    """With num_items_in_batch each micro-batch's loss is divided by the tokens of all of them."""

    class TokenMean(small_runs.Net):
        accepts_loss_kwargs = True

        def forward(self, x: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
            out = self.layers(x).squeeze(-1)
            kept = labels != -100
            total = ((out - labels)[kept] ** 2).sum()
            return {
                "loss": total / (kept.sum() if num_items_in_batch is None else num_items_in_batch)
            }

    run = small_runs.trainer(tmp_path, steps=1, gradient_accumulation_steps=4)
    run.model = run.model_wrapped = TokenMean()
    run.model_accepts_loss_kwargs = True
    run.train_dataset.y[2:9] = -100  # most of two micro-batches
    data = run.train_dataset
    kept = data.y != -100
    with torch.no_grad():
        true = nn.functional.mse_loss(run.model.layers(data.x).squeeze(-1)[kept], data.y[kept])
    callback = HealingCallback()
    run.add_callback(callback)
    run.train()
    assert counts(callback, "loss") == pytest.approx([float(true)], rel=1e-5)
