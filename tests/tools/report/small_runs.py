"""Real runs, small ones: a torch Healer with faults in its data, its events and its metrics."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from healcore.runtime.healer import Healer
from tests.healer.run_options import grouped


class Loop:
    """A regression of 100 numbers a batch; what is in a batch follows from its number."""

    def __init__(self, nan: Iterable[int] = (), large: Iterable[int] = ()) -> None:
        torch.manual_seed(0)
        self.nan, self.large = frozenset(nan), frozenset(large)
        layers = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def loss(self, number: int) -> torch.Tensor:
        inputs = torch.randn(12, 8, generator=torch.Generator().manual_seed(number))
        targets = inputs.sum(dim=1, keepdim=True).sin()
        targets = targets * float("nan") if number in self.nan else targets
        targets = targets * 30 if number in self.large else targets
        return (self.model(inputs) - targets).square().mean()


def train(
    folder: Path,
    loop: Loop,
    *,
    policy: Any = "pretraining",
    batches: int = 600,
    disk: bool = False,
    before: Callable[[Healer, int], None] | None = None,
    **options: Any,
) -> Path:
    """A run in `folder`, on from the one before if there was one; its events file.

    A run that the policy stops is over, and that is all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    events = folder / "run.events.jsonl"
    with (
        contextlib.suppress(SystemExit),
        Healer(
            policy,
            state=loop.state,
            store=folder / "checkpoints" if disk else None,
            **grouped(options, events=events, metrics=folder / "run.metrics.jsonl"),
        ) as healer,
    ):
        for number in healer.batches(range(batches)):
            if before is not None:
                before(healer, int(number))
            loss = loop.loss(int(number))
            healer.observe(loss)
            loss.backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    return events


class Broken(RuntimeError):
    """The exception of the training loop."""


def broken_and_resumed(folder: Path) -> Path:
    """A process that dies of an exception at step 320, and one that goes on from its checkpoint."""

    def breaks(healer: Healer, number: int) -> None:
        if healer.step == 320:
            raise Broken("the network file system went away")

    with contextlib.suppress(Broken):
        train(folder, Loop(nan=range(150, 162)), before=breaks, disk=True)
    return train(folder, Loop(nan=range(450, 462)), disk=True)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The content of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
