"""Training runs that run out of memory at a chosen operation of a forward or backward pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from healcore import Logging
from healcore.runtime.healer import Healer

STEPS, ACCUMULATED, BATCH = 3, 2, 8


class FailAt(TorchDispatchMode):
    """Raises torch.OutOfMemoryError at given operations, counted from 1 while it is active."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.numbers = numbers
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count in self.numbers:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0")
        return func(*args, **(kwargs or {}))


class Outcome(NamedTuple):
    """What a run leaves behind."""

    state: dict[str, Tensor]
    losses: list[float]
    """As judged, one for each step."""
    sizes: list[list[int]]
    """Samples of each part that was completed, one list for each step."""


def model_with_everything() -> nn.Module:
    """Dropout draws random numbers, batch normalisation keeps statistics."""
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Tanh(), nn.Linear(6, 2)
    )


def data() -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, 4, generator=random), torch.randn(BATCH, 2, generator=random))
        for _ in range(STEPS * ACCUMULATED)
    ]


def train(
    fail: FailAt, metrics: Path, *, most: Callable[[int], int | None] = lambda step: None
) -> Outcome:
    """Trains for `STEPS` steps of `ACCUMULATED` batches; `most`: by the step."""
    torch.manual_seed(0)
    model = model_with_everything()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    with Healer(state=state, logging=Logging(metrics=metrics)) as healer:
        sizes = loop(healer, model, optimizer, data(), fail, most)
        end = {name: each.clone() for name, each in model.state_dict().items()}
    return Outcome(end, losses_in(metrics), sizes)


def loop(
    healer: Healer[Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[Any],
    fail: FailAt,
    most: Callable[[int], int | None],
    around: Callable[[bool], Any] = lambda reduces: nullcontext(),
) -> list[list[int]]:
    """Takes the steps; the samples of each part that was completed, step by step.

    `around` makes a context for each part; it takes whether the part is the last of its step.
    """
    sizes: list[list[int]] = [[] for _ in range(len(batches) // ACCUMULATED)]
    for number, batch in enumerate(healer.batches(batches)):
        done, last = sizes[number // ACCUMULATED], number % ACCUMULATED == ACCUMULATED - 1
        if (limit := most(healer.step)) is not None:
            healer._loop.record.part_limit = limit
        for part in healer.microbatches(batch):
            with part, fail, around(last and part.last):
                x, y = part.batch
                loss = (model(x) - y).square().mean()
                healer.observe(loss)
                (loss * part.weight / ACCUMULATED).backward()
            if part.first:
                done.clear()
            if not part.failed:
                done.append(len(part.batch[0]))
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return sizes


def losses_in(metrics: Path) -> list[float]:
    """The losses by which the steps of a run were judged."""
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
