"""The training of `healcore demo` in torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from healcore.runtime.healer import Healer
from healcore.runtime.run.ending.exits import RunStopped


def train(
    policy: Any, store: Any, batches: Sequence[Any], rates: Sequence[float], unseen: Any
) -> float:
    """Trains a small network with a Healer.

    Args:
        policy: the policy of the run.
        store: folder of the checkpoints and events.
        batches: the inputs and targets of each step, as NumPy arrays.
        rates: the learning rate of each step.
        unseen: the batch for the evaluation.

    Returns:
        The loss on `unseen` at the end.
    """
    torch.set_num_threads(1)  # more threads are slower for such small matrices
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=rates[0])

    def loss_fn(batch: Any) -> Tensor:
        inputs, targets = map(torch.from_numpy, batch)
        return (model(inputs) - targets).square().mean()

    state = {"model": model, "optimizer": optimizer}
    with suppress(RunStopped), Healer(policy, state=state, store=store, loss_fn=loss_fn) as healer:
        for batch in healer.batches(batches):
            for group in optimizer.param_groups:
                group["lr"] = rates[healer.step]
            healer.loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return loss_fn(unseen).item()
