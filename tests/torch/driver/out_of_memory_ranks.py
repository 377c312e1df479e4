"""One of several ranks, of which some run out of memory.

A case is the distance of the operations that fail, or 0 for sharded parameters on two ranks. Its
outcome is a dictionary of many.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from healcore import Logging
from healcore.runtime.healer import Healer
from tests.healer.run_options import grouped
from tests.torch.driver import out_of_memory_runs as runs
from tests.torch.worlds import folder as shared_folder
from tests.torch.worlds import serve

WORLD = 3
SECONDS = 1500
STEPS, ACCUMULATED, BATCH = 4, 2, 8


class FailAt(runs.FailAt):
    """Counts what may allocate: neither what DDP does with its buckets nor exchanges."""

    NO_MEMORY = ("c10d", "copy_", "mul.out", "zero_", "view", "detach", "div_", "as_strided")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in self.NO_MEMORY):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def data(rank: int) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(100 + rank)
    shapes = [(BATCH, 4), (BATCH, 2)] * (STEPS * ACCUMULATED)
    made = [torch.randn(each, generator=random, dtype=torch.float64) for each in shapes]
    return [*zip(made[::2], made[1::2], strict=True)]


def plain() -> nn.Module:
    """Its gradients are those of the whole batch, however that is split."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def train(
    root: Path,
    fail: FailAt,
    *,
    make: Callable[[], nn.Module] = runs.model_with_everything,
    most: Callable[[int], int | None] = lambda step: None,
    no_sync: bool = False,
    inner: bool = False,
    **ddp: Any,
) -> dict[str, Any]:
    """Trains for `STEPS` steps of `ACCUMULATED` batches; what this rank has then."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = make().double()
    model = DistributedDataParallel(net, **ddp)
    torch.manual_seed(rank)  # dropout
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    state = {"model": net if inner else model, "optimizer": optimizer}
    metrics = root / "metrics.jsonl"

    def around(reduces: bool) -> Any:
        return model.no_sync() if no_sync and not reduces else nullcontext()

    with Healer(
        state=state,
        logging=Logging(metrics=metrics, events=root / "events.jsonl"),
    ) as healer:
        sizes = runs.loop(healer, model, optimizer, data(rank), fail, most, around)
    return {
        "sizes": sizes,
        "weights": [p.detach().flatten().tolist() for p in net.parameters()],
        "buffers": [b.flatten().tolist() for b in net.buffers()],
        "losses": runs.losses_in(metrics) if rank == 0 else [],
        "faults": faults(root / "events.jsonl") if rank == 0 else [],
        "operations": fail.count,
        "draws": torch.rand(1).item(),
    }


# -- one loop, changed in one thing ----------------------------------------------------------------


def memory(fits: dict[int, int]) -> Callable[[int, int], None]:
    """Each rank has memory for so many samples; a rank that is not named, for any number."""

    def use(samples: int, step: int) -> None:
        if samples > fits.get(dist.get_rank(), samples):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0")

    return use


def rows(number: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(dist.get_rank())
    return tuple(torch.randn(number, n, generator=random, dtype=torch.float64) for n in (4, 2))  # type: ignore[return-value]


def loop(
    events: Path,
    use: Callable[[int, int], None] = lambda samples, step: None,
    *,
    batches: Any = None,
    by_hand: bool = False,
    wrap: Callable[[nn.Module], Any] = DistributedDataParallel,
    **options: Any,
) -> dict[str, Any]:
    """Trains a model on a list of batches of arrays; what this rank has then, or its exception."""
    torch.manual_seed(0)
    net: nn.Module = plain().double()
    model = net if by_hand else wrap(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes: list[list[int]] = []
    raised: dict[str, Any] = {}
    state = {"model": model, "optimizer": optimizer}
    try:
        with Healer(state=state, **grouped(options, events=events)) as healer:
            for batch in healer.batches(batches or [rows(BATCH)] * 4):
                sizes.append([])
                for part in healer.microbatches(batch):
                    with part:
                        x, y = part.batch[:2]
                        use(len(x), healer.step)
                        loss = (model(x) - y).square().mean()
                        (loss * part.weight).backward()
                        healer.observe(loss)
                    if part.first:
                        sizes[-1].clear()
                    if not part.failed:
                        sizes[-1].append(len(x))
                if by_hand:
                    for p in net.parameters():
                        assert p.grad is not None
                        dist.all_reduce(p.grad)
                        p.grad /= WORLD
                optimizer.step()
                optimizer.zero_grad()
    except BaseException as error:
        notes = getattr(error, "__notes__", [])
        raised = {"type": type(error).__name__, "said": f"{error} {' '.join(notes)}"}
    return {
        "sizes": sizes,
        "weights": [p.detach().flatten().tolist() for p in net.parameters()] if not raised else [],
        "faults": faults(events) if dist.get_rank() == 0 else [],
        "raised": raised,
    }


def edges(folder: Callable[[str], Path]) -> Any:
    """(name, what this rank found) for cases of `loop`."""
    rank = dist.get_rank()

    def run(name: str, *args: Any, **options: Any) -> tuple[str, dict[str, Any]]:
        return name, loop(folder(name) / "events.jsonl", *args, **options)

    yield run("loop")
    yield run("by hand", memory({1: 3}), by_hand=True)
    yield run("one sample", memory({1: 0}))
    uneven = [rows(6 + 5 * rank)] * 4
    yield run("uneven", batches=uneven)
    yield run("uneven, limited", memory({1: 4}), batches=uneven)

    static = partial(DistributedDataParallel, static_graph=True)
    yield run("static graph", memory({0: 0, 1: 0, 2: 0}), wrap=static)


def sharded(folder: Callable[[str], Path]) -> Any:
    """The same, in the collectives of FSDP2."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    events = folder("sharded") / "events.jsonl"
    yield (
        "sharded",
        loop(events, memory({1: 0}), wrap=lambda net: fully_shard(net, mesh=mesh)),
    )


# -- all cases ------------------------------------------------------------------------------------


def faults(events: Path) -> list[tuple[int, str]]:
    """Step and problem of each event that reports smaller parts."""
    found = map(json.loads, events.read_text().splitlines())
    return [(each["step"], each["problem"]) for each in found if each["kind"] == "fault"]


def cases(root: Path, every: int) -> Any:
    """(name, what this rank found) for each case."""
    rank = dist.get_rank()

    def on(numbers: dict[int, tuple[int, ...]]) -> FailAt:
        return FailAt(*numbers.get(rank, ()))

    def folder(name: str) -> Path:
        found = root / str(rank) / name.replace(" ", "_")
        found.mkdir(parents=True)
        return found

    if not every:
        yield from sharded(folder)
        return
    whole = train(folder("whole"), FailAt())
    yield "whole", whole
    for step in range(STEPS):
        half = lambda now, s=step: BATCH // 2 if now >= s else None  # noqa: E731
        yield f"from {step}", train(folder(f"from {step}"), FailAt(), most=half)
    yield "quarters", train(folder("quarters"), FailAt(), most=lambda now: BATCH // 4)
    for number in range(1, whole["operations"] + 1, every):
        yield f"rank 1 at {number}", train(folder(f"at {number}"), on({1: (number,)}))
    operations = whole["operations"] // STEPS
    for name, numbers in {
        "two ranks": {0: (5,), 2: (20,)},
        "two ranks, later": {0: (3 * operations + 3,), 2: (3 * operations + 20,)},
    }.items():
        yield name, train(folder(name), on(numbers))
    yield "again", train(folder("again"), on({1: (3,), 2: (operations,)}))

    alike = train(folder("plain"), FailAt(), make=plain)
    yield "plain", alike
    late = alike["operations"] * 2 // 3
    for name, options in {
        "many buckets": {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True},
        "no_sync, inner module": {"no_sync": True, "inner": True},
    }.items():
        fails = on({1: (9,), 2: (late,)})
        yield name, train(folder(name), fails, make=plain, **options)
    yield from edges(folder)


def outcomes(every: str) -> dict[str, Any]:
    gc.collect()
    gc.freeze()
    found = dict(cases(shared_folder(), int(every)))
    return {**found, "cases": [*found]}


if __name__ == "__main__":
    serve(outcomes, seconds=SECONDS, ends=False)  # sharded: a rank leaves while another waits
