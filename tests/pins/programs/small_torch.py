"""The small model of the programs in torch: dropout, AdamW and a schedule of the learning rate."""

from typing import Any

import torch
from torch.utils.data import TensorDataset

from tests.pins.programs.interruptions import Run


def rows(count: int) -> TensorDataset:
    """Rows with their numbers, from a seed of their own."""
    make = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 4, generator=make)
    return TensorDataset(torch.arange(count), inputs, inputs.sum(1, keepdim=True).tanh())


class Training:
    """A model, its optimizer and its schedule, the same at each start."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }

    def loss_fn(self, batch: Any) -> torch.Tensor:
        _, inputs, targets = batch
        return (self.model(inputs) - targets).square().mean()

    def step(self, run: Run, healer: Any, batch: Any) -> bool:
        """One step, as a program has it in the body of its loop.

        Returns:
            Whether the program has to leave its loop now.
        """
        step = healer.step
        left = self.act(run.interrupt("before", step))
        if left:
            return True
        loss = healer.loss(batch)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        run.trained(step, batch[0].tolist(), loss.item())
        return self.act(run.interrupt("after", step))

    def act(self, kind: str | None) -> bool:
        """Damages the weights if the interruption is damage. Returns whether it is a `break`."""
        if kind == "damage":
            damage(self.model)
        return kind == "break"

    def end(self, run: Run, healer: Any) -> None:
        run.ended(healer.step, arrays_of(self.model, self.optimizer))


def damage(model: torch.nn.Module) -> None:
    """What a faulty device may do: the weights of a layer are NaN."""
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))


def arrays_of(model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """All that a step changes: weights, buffers, moments, and the global generator."""
    found: dict[str, Any] = {**model.state_dict(), "drawn": torch.rand(())}
    for number, optimizer in enumerate(optimizers):
        for place, state in enumerate(optimizer.state.values()):
            found |= {f"{number}.{place}.{name}": value for name, value in state.items()}
    return {name: torch.as_tensor(value).detach().clone() for name, value in found.items()}
