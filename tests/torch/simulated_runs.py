"""Runs on a simulated accelerator and on the CPU, each in a process of its own.

python -m tests.torch.simulated_runs decisions default
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from healcore import Checkpoints, Healer, Logging
from healcore.events import read
from healcore.torch import attach
from tests.torch import simulated_device
from tests.torch.simulated_device import DEVICE, uploads, waits

CPU = torch.device("cpu")
READ = "healcore.torch.measurement:AsyncCopy.read"
"""A wait here and on other accelerators; on CUDA the copy has been under way for a step."""
FIRST = "healcore.torch.measurement:read"
SAVE_EVERY, STEPS = 40, 200

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, fused=True),
}


class Run:
    """Regression on a fixed net's outputs."""

    def __init__(self, device: torch.device, optimizer: str = "AdamW") -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.0), nn.Linear(32, 4)
        )
        self.teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        self.model.to(device)
        self.optimizer = OPTIMIZERS[optimizer](list(self.model.parameters()))

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(number)
        x = torch.randn(32, 16, generator=random)
        with torch.no_grad():
            return x.to(self.device), self.teacher(x).to(self.device)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def harm(self, step: int, loss: Tensor) -> Tensor:
        """The loss of a step, with all kinds of trouble at some."""
        return loss * {12: math.nan, 16: 1e5, 20: math.inf}.get(step, 1.0)

    def harm_gradients(self, step: int) -> None:
        factor = {14: math.nan, 18: 1e5}.get(step)
        if factor is not None:
            for p in self.model.parameters():
                assert p.grad is not None
                p.grad.mul_(factor)


def found_waits() -> Counter[str]:
    """Waits since the last call, by the function of healcore that they were in."""
    counted = Counter(waits)
    waits.clear()
    return counted


def decisions(policy: str, optimizer: str = "AdamW", **overrides: Any) -> None:
    """The device engine decides as the host engine on the CPU, and the host does not wait."""
    decided: list[list[Any]] = []
    for device, engine in ((CPU, "host"), (DEVICE, "device")):
        run, here = Run(device, optimizer), []
        heal = attach(run.optimizer, policy, engine=engine, compile=False, **overrides)  # type: ignore[arg-type]
        for step in range(24):
            batch = run.batch(step)
            waits.clear()  # those of the batch
            uploads.clear()
            loss = run.harm(step, run.loss(batch))
            heal.observe(loss)
            loss.backward()
            run.harm_gradients(step)
            run.optimizer.step()
            run.optimizer.zero_grad()
            heal.metrics()
            if device is DEVICE:
                # The host decides the step in which a fused SGD creates its momentum.
                first = {FIRST} if optimizer == "SGD" and step == 0 else set()
                assert found_waits().keys() <= {READ} | first
                assert not uploads, Counter(uploads)
            decision = heal.last_decision()
            assert decision is not None
            here.append(
                (decision.skip, decision.cause, decision.action, round(decision.grad_scale, 4))
            )
        decided.append(here)
    on_cpu, on_device = decided
    assert on_device == on_cpu
    assert sum(skip for skip, *_ in on_cpu) >= 3, "the harm is seen"


def trained(device: torch.device, folder: Path, optimizer: str) -> tuple[float, list[Any]]:
    """Final loss and rollbacks of a run with a NaN, and with a rate 100 times too high."""
    run = Run(device, optimizer)
    events = folder / f"{device.type}.jsonl"
    state = {"model": run.model, "optimizer": run.optimizer}
    with Healer(
        "default",
        state=state,
        store=folder / device.type,
        logging=Logging(events=events),
        loss_fn=run.loss,
        checkpoints=Checkpoints(every=SAVE_EVERY),
        attach={"engine": "host" if device is CPU else "device", "compile": False},
    ) as healer:
        for batch in healer.batches([run.batch(number) for number in range(STEPS)]):
            for group in run.optimizer.param_groups:
                group["lr"] = 1.0 if 130 <= healer.step < 160 else 0.01
            loss = healer.loss(batch)
            if healer.step == 12:
                loss = loss * math.nan
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
    with torch.no_grad():
        end = float(run.loss(run.batch(10**6)).cpu())
    backs = [e["checkpoint"] for e in read(events).events if e["kind"] == "rollback"]
    return end, backs


def rollback(optimizer: str = "AdamW") -> None:
    """A Healer on the device skips, compares weights and rolls back as on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        on_cpu = trained(CPU, Path(folder), optimizer)
        on_device = trained(DEVICE, Path(folder), optimizer)
    assert on_cpu[1], "there is a rollback"
    assert on_device[1] == on_cpu[1]
    assert math.isclose(on_device[0], on_cpu[0], rel_tol=1e-3), (on_device, on_cpu)


def mixed() -> None:
    """The simulation itself: it fails where CUDA would, and counts what waits."""
    device, host = torch.ones(2, device=DEVICE), torch.ones(2)
    try:
        torch.add(device, host)
    except RuntimeError as error:
        assert "same device" in str(error)
    else:
        raise AssertionError("tensors of two devices were added")
    found_waits()
    for wait in (
        lambda: device.sum().item(),
        device.cpu,
        lambda: bool(device[0] > 0),
        lambda: host.to(DEVICE),
        lambda: device.copy_(host),
    ):
        wait()
    assert found_waits() == {"user": 5}
    uploads.clear()
    host.to(DEVICE, non_blocking=True)
    assert uploads == ["user"]
    assert (device * 2 + torch.ones(())).tolist() == [3.0, 3.0]
    assert simulated_device.waits == ["user"]


if __name__ == "__main__":
    name, *given = sys.argv[1:]
    chosen = dict(each.split("=") for each in given if "=" in each)
    options = {key: {"kind": value} for key, value in chosen.items()}
    globals()[name](*(each for each in given if "=" not in each), **options)
