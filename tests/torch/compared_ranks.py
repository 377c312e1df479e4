"""One of several ranks that heal a run with a `loss_fn`. All worlds have the same global batches.

A case is a layout and a fault, or "raises": the `loss_fn` fails on rank 1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from healcore import Checkpoints, Hooks, Logging
from healcore.runtime.dominance import dominance
from healcore.runtime.healer import Healer
from tests.torch.worlds import serve

SECONDS = 300
STEPS, FAULT, SAVE_EVERY, ROWS = 110, 65, 20, 16
"""Steps of a run, step of its fault, steps between two checkpoints, rows of a global batch."""
RATE, JUMP = 1e-2, 100.0
FAULTS = ("damage", "rate", "healthy")
"""Two layers x 50, once; the rate x 100; targets x 10 from then on, which is no fault."""
FAILING_STEPS, FAILING_FAULT = 60, 45


def layout(kind: str) -> tuple[nn.Module, Any, slice]:
    """The module of the state, how to call it, and this rank's rows of a batch."""
    torch.manual_seed(0)
    hidden = nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()
    module = nn.Sequential(*hidden, nn.Linear(16, 1))
    if kind == "alone":
        return module, module, slice(None)
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    if kind == "tensor parallel":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(module, init_device_mesh("cpu", (world,)), plan)
        return module, module, slice(None)
    if kind == "FSDP2":
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(module[2], mesh=mesh)
        fully_shard(module, mesh=mesh)
        return module, module, mine
    return module, DistributedDataParallel(module), mine


def watched(comparisons: dominance.Dominance, seen: list[Any]) -> None:
    """Notes every pair of losses that is compared, and the anchor.

    An evaluation costs as much as a step: the measured price would set the distance of regular
    comparisons, so that a slow machine compares at other steps than a fast one.
    """
    evaluate = comparisons._losses_of
    comparisons._budget._measure_step = lambda: None  # type: ignore[method-assign]

    def losses_of(steps: Any, anchor: Any, known: Any = None) -> Any:
        found = evaluate(steps, anchor, known)
        assert found is not None
        now, then = found
        indices = [each.index for each in steps]
        if indices != [anchor.step]:  # that is the check of the loss_fn, which compares nothing
            seen.append({"steps": indices, "anchor": anchor.step, "now": now, "then": then})
        return found

    comparisons._losses_of = losses_of  # type: ignore[method-assign]


def run(kind: str, fault: str) -> dict[str, Any]:
    """One healed run with a fault at step `FAULT`."""
    module, model, mine = layout(kind)
    optimizer = AdamW(module.parameters(), lr=RATE)
    seen: list[Any] = []
    rollbacks: list[Any] = []
    parts = 2 if kind == "accumulated" else 1
    damaged = False

    def loss_fn(part: int) -> Tensor:
        step, which = divmod(part, parts)
        random = torch.Generator().manual_seed(step)
        x = torch.randn(ROWS, 8, generator=random)
        noise = torch.randn(ROWS, 1, generator=random)
        target = torch.sin(x.sum(1, keepdim=True)) + 0.3 * noise
        if fault == "healthy" and step >= FAULT:
            target = 10.0 * target
        x, target = x[mine].chunk(parts)[which], target[mine].chunk(parts)[which]
        return (model(x) - target).square().mean()

    state = {"model": module, "optimizer": optimizer}
    with Healer(
        "default",
        state=state,
        loss_fn=loss_fn,
        checkpoints=Checkpoints(every=SAVE_EVERY),
        rollback={"probation": SAVE_EVERY},
        hooks=Hooks(on_rollback=[lambda event: rollbacks.append(dict(event))]),
        logging=Logging(console=False),
    ) as healer:
        watched(healer._loop.recovery.dominance, seen)  # type: ignore[union-attr]
        for part in healer.batches(list(range(STEPS * parts))):
            step, which = divmod(part, parts)
            if fault == "damage" and step == FAULT and not damaged:
                damaged = True
                with torch.no_grad():
                    for layer in (2, 4):
                        module[layer].weight.mul_(50.0)  # type: ignore[index, operator, union-attr]
            optimizer.param_groups[0]["lr"] = RATE * (
                JUMP if fault == "rate" and step >= FAULT else 1.0
            )
            loss = healer.loss(part)
            (loss / parts).backward()
            if which == parts - 1:
                optimizer.step()
                optimizer.zero_grad()
        metrics = healer.metrics()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
    names = ("step", "checkpoint", "onset", "lr_limit", "lr_scale", "batches")
    return {
        "compared": seen,
        "rollbacks": [{name: each.get(name) for name in names} for each in rollbacks],
        "lr_scale": metrics["heal/lr_scale"],
        "norm": float(torch.stack([p.detach().norm() for p in whole]).norm()),
    }


def failing() -> dict[str, Any]:
    """A run with damage, in which `loss_fn` fails on rank 1 at one of the next comparisons."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model = DistributedDataParallel(net)
    optimizer = AdamW(net.parameters(), lr=1e-2)
    asked_at = -1

    def loss_of(step: int) -> torch.Tensor:
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        return (model(x) - x.sum(1, keepdim=True)).square().mean()

    def loss_fn(step: int) -> Any:
        nonlocal asked_at
        asked_at = done
        if rank == 1 and done > FAILING_FAULT + 3:
            raise ValueError("no such row")
        return loss_of(step)

    done = 0
    problems: list[str] = []
    with Healer(
        "default",
        state={"model": net, "optimizer": optimizer},
        loss_fn=loss_fn,
        checkpoints=Checkpoints(every=20),
        logging=Logging(console=False),
    ) as healer:
        loop: Any = healer._loop
        loop.recovery.dominance.loss_function._warn = problems.append
        for step in healer.batches(list(range(FAILING_STEPS))):
            if done == FAILING_FAULT:
                with torch.no_grad():
                    net[2].weight.mul_(50.0)  # type: ignore[operator, union-attr]
            loss = loss_of(step)
            healer.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
    weights = [float(p.detach().sum()) for p in net.parameters()]
    return {"steps": done, "asked at": asked_at, "problems": problems, "weights": weights}


def outcome(case: str) -> dict[str, Any]:
    if case == "raises":
        return failing()
    kind, fault = case.split(", ")
    return run(kind, fault)


if __name__ == "__main__":
    serve(outcome, seconds=SECONDS)
