"""A small run in torch whose weights are compared with earlier ones."""

import contextlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from healcore import Healer
from healcore.events import read
from tests.healer.run_options import grouped

STEPS, CHANGE = 360, 205
"""Steps of a run, and the step at which something happens."""


@cache
def batch_of(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()


class ComparedRun:
    """Classification by a small net; `parts` batches per step, `weight` of a second loss term."""

    def __init__(self, *, dropout: float = 0.0, parts: int = 1, full_batch: bool = False) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 32),
            torch.nn.BatchNorm1d(32),
            torch.nn.Tanh(),
            torch.nn.Dropout(dropout),
            torch.nn.Linear(32, 4),
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.parts, self.full_batch = parts, full_batch
        self.relabelled_from = 10 * STEPS
        self.weight, self.scale = 0.0, 1.0

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch_of(0 if self.full_batch else number)
        return x, y if number < self.relabelled_from else (y + 1) % 4

    def loss(self, number: int) -> torch.Tensor:
        x, y = self.batch(number)
        out = self.model(x)
        second = self.weight * (out - 20 * x[:, :4]).square().mean()
        return self.scale * torch.nn.functional.cross_entropy(out, y) + second

    def train(
        self,
        folder: Path,
        *,
        at: Callable[[Healer], object] = lambda healer: None,
        policy: Any = "default",
        asks: bool = True,
        gives_loss: bool = False,
        steps: int = STEPS,
        loaders: Sequence[range] = (),
        **options: Any,
    ) -> Healer:
        """Trains; `at` is called before each step, and `asks` gives a `loss_fn`."""
        state = {"model": self.model, "optimizer": self.optimizer}
        options = {"loss_fn": self.loss if asks else None, **options}
        place = 0
        with (
            contextlib.suppress(SystemExit),
            Healer(policy, state=state, **grouped(options, events=folder / "e.jsonl")) as healer,
        ):
            for loader in loaders or [range(steps * self.parts)]:
                for number in healer.batches(loader):
                    at(healer)
                    loss = healer.loss(number) if gives_loss else self.loss(number)
                    if not gives_loss:
                        healer.observe(loss)
                    (loss / self.parts).backward()
                    place += 1
                    if place % self.parts == 0:
                        self.optimizer.step()
                        self.optimizer.zero_grad()
        return healer

    def unseen_loss(self) -> float:
        """The loss on batches that were not trained on."""
        self.model.eval()
        with torch.no_grad():
            found = [float(self.loss(number)) for number in range(3_000, 3_010)]
        self.model.train()
        return sum(found) / len(found)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read(folder / "e.jsonl").events if event["kind"] == kind]


def left_alone(folder: Path, healer: Healer) -> None:
    """Asserts that nothing was done to the run."""
    assert healer.rollbacks == 0
    assert healer.metrics()["heal/lr_scale"] == 1.0
    assert events(folder, "end")[0]["ending"] == "completed"


def at_change(action: Callable[[], object], *, again: bool = False) -> Callable[[Healer], None]:
    """Does it before step `CHANGE`; with `again` also when a rollback leads there once more."""
    done = []

    def at(healer: Healer) -> None:
        if healer.step == CHANGE and (again or not done):
            done.append(True)
            with torch.no_grad():
                action()

    return at
