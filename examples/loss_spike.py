"""Four bad batches, and what each policy does about them.

python examples/loss_spike.py
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch

import healcore

STEPS = 600
BAD = range(300, 304)
"""Steps whose targets are 50 times as large."""


def train(
    policy: str | None,
    bad: Collection[int] = BAD,
    *,
    compare: bool = False,
    store: str | None = None,  # None: checkpoints in host memory
) -> str:
    """Trains the whole run, and says how it has ended."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses = {}

    def loss_of(step: int) -> torch.Tensor:
        inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))
        targets = inputs.sum(dim=1, keepdim=True).sin() * (50.0 if step in bad else 1.0)
        return (model(inputs) - targets).square().mean()

    def train_step(step: int, loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses[step] = loss.item()

    did = ""
    if policy is None:
        for step in range(STEPS):
            train_step(step, loss_of(step))
    else:
        state = {"model": model, "optimizer": optimizer, "schedule": schedule}
        loss_fn = loss_of if compare else None
        with healcore.Healer(policy, state=state, store=store, loss_fn=loss_fn) as healer:
            for step in healer.batches(range(STEPS)):
                loss = loss_of(step)
                healer.observe(loss)
                train_step(step, loss)
            skipped = len(healer.report().skipped_batches)
            did = f"rollbacks {healer.rollbacks}, batches skipped {skipped}"
    highest = max(loss for step, loss in losses.items() if step >= BAD.stop)
    with torch.no_grad():
        final = sum(loss_of(step).item() for step in range(STEPS, STEPS + 20)) / 20
    return f"highest loss after {highest:8.3f}, final {final:.3f}; {did}"


def main() -> None:
    """Prints a line for each run."""
    logging.getLogger("healcore").setLevel(logging.ERROR)
    print("no bad batches  ", train(None, bad=()))
    print("no protection   ", train(None))
    print("default         ", train("default"))
    print("default, loss_fn", train("default", compare=True))
    print("pretraining     ", train("pretraining"))


if __name__ == "__main__":
    main()
