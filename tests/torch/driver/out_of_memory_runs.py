"""Training runs that run out of memory at a chosen operation of a forward or backward pass."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from healcore import Logging
from healcore.runtime.healer import Healer
from healcore.runtime.run import out_of_memory as parts_of_batches
from tests.open_run import run_of

STEPS, ACCUMULATED, BATCH = 3, 2, 8


class FailAt(TorchDispatchMode):
    """Raises OutOfMemoryError at some of the operations that may allocate, counted from 1."""

    NO_MEMORY = ("c10d", "copy_", "mul.out", "zero_", "view", "detach", "div_", "as_strided")

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


def plain() -> nn.Module:
    """Has the same gradients, however the batch is split."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def data(seed: int, samples: int) -> list[tuple[Tensor, ...]]:
    random = torch.Generator().manual_seed(100 + seed)

    def draw(n: int) -> Tensor:
        return torch.randn(samples, n, generator=random, dtype=torch.float64)

    return [(draw(4), draw(2)) for _ in range(STEPS * ACCUMULATED)]


def train(
    folder: Path,
    fail: Any = None,
    *,
    seed: int = 1,
    samples: int = BATCH,
    make: Callable[[], nn.Module] = model_with_everything,
    wrap: Callable[[nn.Module], Any] = lambda net: net,
    inner: bool = False,
    no_sync: bool = False,
    reduce: Callable[[nn.Module], object] = lambda net: None,
    fits: int | None = None,
    most: Callable[[int], int | None] = lambda step: None,
    wait: int = parts_of_batches.GOOD_STEPS,
) -> dict[str, Any]:
    """Trains for `STEPS` steps of `ACCUMULATED` batches; what this process has then.

    `wrap` makes what is called, which is not in the state with `inner`; `reduce` is called before
    each step of the optimizer; there is memory for `fits` samples, and a step begins with parts of
    at `most` so many. Larger parts are tried after `wait` steps.
    """
    torch.manual_seed(0)
    net = make().double()
    model = wrap(net)

    def allocate(module: nn.Module, given: Any) -> None:
        if fits is not None and len(given[0]) > fits:
            raise out_of_memory()

    model.register_forward_pre_hook(allocate, prepend=True)
    torch.manual_seed(seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    state = {"model": net if inner else model, "optimizer": optimizer}
    events, metrics = folder / "events.jsonl", folder / "metrics.jsonl"
    sizes: list[list[int]] = [[] for _ in range(STEPS)]
    found: dict[str, Any] = {"sizes": sizes, "raised": {}}
    try:
        with (
            patch.object(parts_of_batches, "GOOD_STEPS", wait),
            Healer(state=state, logging=Logging(metrics=metrics, events=events)) as healer,
        ):
            for number, batch in enumerate(healer.batches(data(seed, samples))):
                done = sizes[number // ACCUMULATED]
                last = number % ACCUMULATED == ACCUMULATED - 1
                if (limit := most(healer.step)) is not None:
                    run_of(healer).record.part_size.limit = limit
                for part in healer.microbatches(batch):
                    waits = no_sync and not (last and part.last)
                    with part, fail or nullcontext(), model.no_sync() if waits else nullcontext():
                        x, y = part.batch
                        loss = (model(x) - y).square().mean()
                        healer.observe(loss)
                        (loss * part.weight / ACCUMULATED).backward()
                    if part.first:
                        done.clear()
                    if not part.failed:
                        done.append(len(x))
                if last:
                    reduce(net)
                    optimizer.step()
                    optimizer.zero_grad()
    except BaseException as error:
        notes = " ".join(getattr(error, "__notes__", []))
        return {"raised": {"type": type(error).__name__, "said": f"{error} {notes}"}}
    lines = [
        json.loads(line) for each in (events, metrics) if each.exists() for line in each.open()
    ]
    return {
        **found,
        "weights": [p.detach().flatten().tolist() for p in net.parameters()],
        "buffers": [b.flatten().tolist() for b in net.buffers()],
        "losses": [each["loss"] for each in lines if "kind" not in each],
        "faults": [(e["step"], e["problem"]) for e in lines if e.get("kind") == "fault"],
        "draws": torch.rand(1).item(),
    }
