"""A rank of a run with a `loss_fn`, by layout and fault; all worlds have the same batches."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from healcore import Checkpoints, Hooks, Logging
from healcore.runtime.healer import Healer
from healcore.runtime.run.witness.witness import Witness
from tests.healer.run_directory import events_of
from tests.open_run import run_of
from tests.torch.forked_ranks import folder, serve
from tests.torch.layouts import spread, whole

SECONDS = 300
STEPS, FAULT, SAVE_EVERY, ROWS = 110, 65, 20, 16
"""Steps of a run, step of its fault, steps between two checkpoints, rows of a global batch."""
RATE, JUMP = 1e-2, 100.0
FAULTS = ("damage", "rate", "healthy")
"""Two layers x 50, once; the rate x 100; targets x 10 from then on, which is no fault.

A fourth one is "raises": damage, and comparisons for which the `loss_fn` fails on rank 1.
"""
NAMES = ("step", "checkpoint", "onset", "lr_limit", "lr_scale", "batches")


def options(rollbacks: list[Any], file: Path | None = None) -> dict[str, Any]:
    """Of a Healer that notes its rollbacks, and writes its events into `file`, if one is given."""

    def note(event: Any) -> None:
        rollbacks.append({name: event.get(name) for name in NAMES})

    return {
        "checkpoints": Checkpoints(every=SAVE_EVERY),
        "rollback": {"probation": SAVE_EVERY},
        "hooks": Hooks(on_rollback=[note]),
        "logging": Logging(console=False, events=file),
    }


def watched(witness: Witness, seen: list[Any]) -> None:
    """Notes every pair of losses that is compared, and the anchor."""
    evaluate = witness.losses_of

    def losses_of(steps: Any, anchor: Any, known: Any = None) -> Any:
        found = evaluate(steps, anchor, known)
        assert found is not None
        now, then = [each for each, _ in found], [each for _, each in found]
        indices = [each.index for each in steps]
        seen.append({"steps": indices, "anchor": anchor.step, "now": now, "then": then})
        return found

    witness.losses_of = losses_of  # type: ignore[method-assign]


def run(case: str) -> dict[str, Any]:
    """One healed run with a fault at step `FAULT`."""
    kind, fault = case.split(", ")
    torch.manual_seed(0)
    hidden = nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()
    net = nn.Sequential(*hidden, nn.Linear(16, 1))
    parts = 2 if kind == "accumulated" else 1
    model, data = spread("DDP" if kind == "accumulated" else kind, net)
    shares = 1 if kind in ("alone", "tensor parallel") else dist.get_world_size()
    optimizer = AdamW(net.parameters(), lr=RATE)
    compared: list[Any] = []
    rollbacks: list[Any] = []
    file = folder() / f"{case}.jsonl"
    damaged, compared_at = False, -1

    def loss_fn(number: int) -> Tensor:
        nonlocal compared_at
        step, which = divmod(number, parts)
        if not torch.is_grad_enabled():
            compared_at = healer.step
            if fault == "raises" and healer.step > FAULT + 3 and dist.get_rank() == 1:
                raise ValueError("no such row")
        random = torch.Generator().manual_seed(step)
        x = torch.randn(ROWS, 8, generator=random)
        target = torch.sin(x.sum(1, keepdim=True)) + 0.3 * torch.randn(ROWS, 1, generator=random)
        if fault == "healthy" and step >= FAULT:
            target = 10.0 * target
        x, target = (each.chunk(shares)[data].chunk(parts)[which] for each in (x, target))
        return (model(x) - target).square().mean()

    with Healer(
        "default",
        state={"model": net, "optimizer": optimizer},
        loss_fn=loss_fn,
        **options(rollbacks, file),
    ) as healer:
        if fault != "raises":
            watched(run_of(healer).witness, compared)
        for number in healer.batches(list(range(STEPS * parts))):
            step, which = divmod(number, parts)
            if fault in ("damage", "raises") and step == FAULT and not damaged:
                damaged = True
                with torch.no_grad():
                    for layer in (2, 4):
                        net[layer].weight.mul_(50.0)  # type: ignore[operator, union-attr]
            jumps = fault == "rate" and step >= FAULT
            optimizer.param_groups[0]["lr"] = RATE * (JUMP if jumps else 1.0)
            loss = healer.loss(number)
            (loss / parts).backward()
            if which == parts - 1:
                optimizer.step()
                optimizer.zero_grad()
        metrics = healer.metrics()
    problems = []
    if not dist.is_initialized() or dist.get_rank() == 0:  # the rank that writes events
        problems = [each["problem"] for each in events_of(file) if each["kind"] == "problem"]
    return {
        "steps": healer.step,
        "compared": compared,
        "compared at": compared_at,
        "problems": problems,
        "rollbacks": rollbacks,
        "lr_scale": metrics["heal/lr_scale"],
        "norm": float(torch.stack([whole(p).norm() for p in net.parameters()]).norm()),
    }


if __name__ == "__main__":
    serve(run, seconds=SECONDS)
