"""A `Healer` on the device: rollback, snapshots, and memory that runs out."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_kit.device import CUDA, DEVICE, NEEDS_CUDA, finish, regression
from healcore import Healer
from healcore.torch.driver import TorchDriver
from healcore.torch.store import MemoryStore

STEPS, HARMED = 300, range(150, 190)


def trained(*, harmed: bool) -> tuple[float, int, int]:
    """Loss on unseen batches, rollbacks and skips of a run."""
    model, batch, loss_fn = regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    state = {"model": model, "optimizer": optimizer}
    with (
        tempfile.TemporaryDirectory() as folder,
        Healer(
            "default", state=state, store=Path(folder), loss_fn=loss_fn, save_every=50
        ) as healer,
    ):
        for each in healer.batches([batch(number) for number in range(STEPS)]):
            for group in optimizer.param_groups:
                group["lr"] = 1.0 if harmed and healer.step in HARMED else 0.01
            loss = healer.loss(each)
            if harmed and healer.step == 60:
                loss = loss * math.nan
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        skips = int(healer.metrics()["heal/skips"])
    with torch.no_grad():
        end = sum(float(loss_fn(batch(10**6 + i))) for i in range(10)) / 10
    return end, healer.rollbacks, skips


def rollback() -> dict[str, Any]:
    """A rate 100 times too high is rolled back, and the run ends like the one without it."""
    (healthy, *none), (end, backs, skips) = trained(harmed=False), trained(harmed=True)
    assert none == [0, 0], none
    assert backs >= 1
    assert skips == 1
    assert end < 1.3 * healthy, (end, healthy)
    return {"rollbacks": backs, "skips": skips, "unseen_loss": end, "undisturbed": healthy}


def snapshots() -> dict[str, Any]:
    """Saves, restores and copies of weights against one plain copy to pinned memory: ratios."""
    side, count = (4096, 32) if CUDA else (256, 8)
    layers = [torch.nn.Linear(side, side, bias=False) for _ in range(count)]
    model = torch.nn.Sequential(*layers).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    params = [each.detach() for each in model.parameters()]
    pinned = [torch.empty(each.shape, pin_memory=CUDA) for each in params]
    store, step = MemoryStore(), [0]
    driver = TorchDriver({"model": model, "optimizer": optimizer}, "default")
    weights = driver.copy_weights()

    def plain() -> None:
        for to, each in zip(pinned, params, strict=True):
            to.copy_(each, non_blocking=True)

    def save() -> None:
        step[0] += 1
        store.save(step[0], {"model": model})

    def wait() -> None:
        store.wait()

    def restore() -> None:
        model.load_state_dict(store.restore(step[0], {"model": model}).state["model"])

    def seconds(call: Callable[[], Any]) -> float:
        finish()
        began = time.perf_counter()
        call()
        finish()
        return time.perf_counter() - began

    rows: dict[str, list[float]] = {}
    for _ in range(6):
        base = seconds(plain)
        finish()
        began = time.perf_counter()
        save()
        blocked = time.perf_counter() - began
        wait()
        taken = {"save, host blocked": blocked, "save": time.perf_counter() - began}
        taken["restore"] = seconds(restore)
        taken["copy of weights"] = seconds(driver.copy_weights)
        taken["weights put back"] = seconds(lambda: driver._evaluation._write_weights(weights))  # pyright: ignore[reportPrivateUsage]
        for name, value in taken.items():
            rows.setdefault(name, []).append(value / base)
        rows.setdefault("plain copy, s", []).append(base)
    driver.close()
    nbytes = sum(each.nbytes for each in params)
    middle = {name: sorted(values[1:])[2] for name, values in rows.items()}
    return {"gigabytes": nbytes / 1e9, "ratios_to_plain_copy": middle}


def out_of_memory() -> dict[str, Any]:
    """Memory that really runs out: the step is done again in parts, with the whole gradient."""
    if not CUDA:
        return NEEDS_CUDA
    torch.cuda.set_per_process_memory_fraction(
        3e9 / torch.cuda.get_device_properties(0).total_memory
    )
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 8192), torch.nn.Tanh(), torch.nn.Linear(8192, 1)
    ).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = torch.randn(80_000, 64, device=DEVICE)
    sizes: list[int] = []
    state = {"model": model, "optimizer": optimizer}
    with Healer("default", state=state) as healer:
        for each in healer.batches([batch] * 3):
            for part in healer.microbatches(each):
                with part:
                    loss = model(part.batch).square().mean()
                    healer.observe(loss)
                    (loss * part.weight).backward()
                    sizes.append(len(part.batch))
            optimizer.step()
            optimizer.zero_grad()
    assert healer.step == 3
    assert max(sizes) < len(batch), "memory did not run out"
    return {"samples": len(batch), "samples_in_a_part": max(sizes)}
