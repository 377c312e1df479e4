"""Training runs that run out of memory at a chosen operation of a forward or backward pass."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from healcore import Logging
from healcore.runtime.healer import Healer

STEPS, ACCUMULATED, BATCH = 3, 2, 8


class FailAt(TorchDispatchMode):
    """Raises OutOfMemoryError at some of the operations that may allocate, counted from 1."""

    NO_MEMORY = ("copy_", "mul.out", "zero_", "view", "detach", "div_", "as_strided")

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.numbers = numbers
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not any(name in str(func) for name in self.NO_MEMORY)
        if self.count in self.numbers:
            self.numbers = tuple(each for each in self.numbers if each != self.count)
            raise out_of_memory()
        return func(*args, **(kwargs or {}))


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0")


def model_with_everything() -> nn.Module:
    """Dropout draws random numbers, batch normalisation keeps statistics."""
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Tanh(), nn.Linear(6, 2)
    )


def data() -> list[tuple[Tensor, ...]]:
    random = torch.Generator().manual_seed(101)
    draw = lambda n: torch.randn(BATCH, n, generator=random, dtype=torch.float64)  # noqa: E731
    return [(draw(4), draw(2)) for _ in range(STEPS * ACCUMULATED)]


def train(
    folder: Path, fail: Any = None, *, most: Callable[[int], int | None] = lambda step: None
) -> dict[str, Any]:
    """Trains for `STEPS` steps of `ACCUMULATED` batches; what this process has then.

    A step begins with parts of at `most` so many samples.
    """
    torch.manual_seed(0)
    model = model_with_everything().double()
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    metrics = folder / "metrics.jsonl"
    sizes: list[list[int]] = [[] for _ in range(STEPS)]
    with Healer(state=state, logging=Logging(metrics=metrics)) as healer:
        for number, batch in enumerate(healer.batches(data())):
            done = sizes[number // ACCUMULATED]
            if (limit := most(healer.step)) is not None:
                healer._loop.record.part_limit = limit
            for part in healer.microbatches(batch):
                with part, fail or nullcontext():
                    x, y = part.batch
                    loss = (model(x) - y).square().mean()
                    healer.observe(loss)
                    (loss * part.weight / ACCUMULATED).backward()
                if part.first:
                    done.clear()
                if not part.failed:
                    done.append(len(x))
            if number % ACCUMULATED == ACCUMULATED - 1:
                optimizer.step()
                optimizer.zero_grad()
    lines = [json.loads(line) for line in metrics.open()]
    return {
        "sizes": sizes,
        "weights": [p.detach().flatten().tolist() for p in model.parameters()],
        "buffers": [b.flatten().tolist() for b in model.buffers()],
        "losses": [each["loss"] for each in lines if "kind" not in each],
        "draws": torch.rand(1).item(),
    }
