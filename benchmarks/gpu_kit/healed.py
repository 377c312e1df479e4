"""A `Healer` on the device: rollback, snapshots, and memory that runs out."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_kit import device
from benchmarks.gpu_kit.device import CUDA, finish, regression
from healcore import Checkpoints, Healer, Logging
from healcore.events import read
from healcore.torch.driver import TorchDriver
from healcore.torch.driver.weights import _write  # pyright: ignore[reportPrivateUsage]
from healcore.torch.store import MemoryStore

STEPS, HARMED = 300, range(150, 190)


def trained(*, harmed: bool) -> tuple[float, int, int]:
    """Loss on unseen batches, rollbacks and skips of a run."""
    model, batch, loss_fn = regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    state = {"model": model, "optimizer": optimizer}
    options: Any = {"state": state, "loss_fn": loss_fn, "checkpoints": Checkpoints(every=50)}
    with tempfile.TemporaryDirectory() as at, Healer("default", store=at, **options) as healer:
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
    side, count = (4096, 16) if CUDA else (256, 8)
    layers = [torch.nn.Linear(side, side, bias=False) for _ in range(count)]
    model = torch.nn.Sequential(*layers).to(device.DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    params = [each.detach() for each in model.parameters()]
    wanted = [each.cpu() if CUDA else each.clone() for each in params]
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

    def restore() -> None:
        model.load_state_dict(store.restore(step[0], {"model": model}).state["model"])

    def put_back() -> None:
        _write(weights, driver._weights._weights())  # pyright: ignore[reportPrivateUsage]

    def check(what: str) -> None:
        same = all(torch.equal(a.cpu(), b) for a, b in zip(params, wanted, strict=True))
        assert same, f"{what}: other weights"

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
        store.wait()
        taken = {"save, host blocked": blocked, "save": time.perf_counter() - began}
        taken["restore"] = seconds(restore)
        taken["copy of weights"] = seconds(driver.copy_weights)
        taken["weights put back"] = seconds(put_back)
        for name, value in taken.items():
            rows.setdefault(name, []).append(value / base)
        rows.setdefault("plain copy, s", []).append(base)
    # Only now: the first saves allocate pinned memory, which may wait for the device.
    with device.no_waits(asleep=True):
        save()
        for each in params:
            each.zero_()  # the save must have read the weights of before
    store.wait()
    leaves = [leaf for copy in store.copies.values() for leaf in copy.flat.leaves.values()]
    copies = [torch.from_numpy(leaf.parts[""]) for leaf in leaves]
    assert all(each.is_pinned() is CUDA for each in copies), "the copies are not pinned"
    restore()
    check("saved and restored")
    for each in params:
        each.zero_()
    put_back()
    check("copied and put back")
    driver.close()
    nbytes = sum(each.nbytes for each in params)
    middle = {name: sorted(values[1:])[2] for name, values in rows.items()}
    return {"gigabytes": nbytes / 1e9, "ratios_to_plain_copy": middle}


class Limited(torch.nn.Sequential):
    """A model with memory for `fits` samples, where there is no CUDA."""

    fits = 200

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The output; OutOfMemoryError for too many samples."""
        if not CUDA and len(input) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. (none is there: simulated)")
        return super().forward(input)


def out_of_memory() -> dict[str, Any]:
    """Memory runs out: the accumulation window is repeated in parts, with the whole gradient.

    On CUDA the memory of the process is limited to 3 GB, and really runs out.
    """
    wide, samples = (8192, 80_000) if CUDA else (64, 800)
    model = Limited(torch.nn.Linear(64, wide), torch.nn.Tanh(), torch.nn.Linear(wide, 1)).to(
        device.DEVICE
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    small, large = (torch.randn(n, 64, device=device.DEVICE) for n in (100, samples))

    def gradients() -> list[torch.Tensor]:
        return [each.grad.clone() for each in model.parameters() if each.grad is not None]

    for each in (small, large):
        for part in each.split(100):
            (model(part).square().mean() * (len(part) / len(each))).backward()
    wanted = gradients()
    optimizer.zero_grad()
    if CUDA:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, 3e9 / total))
    sizes: list[int] = []
    failed, found = 0, []
    state = {"model": model, "optimizer": optimizer}
    folder = Path(tempfile.mkdtemp())
    logging = Logging(events=folder / "run.events.jsonl")
    with Healer("default", state=state, logging=logging) as healer:
        for number, each in enumerate(healer.batches([small, large] * 3)):
            for part in healer.microbatches(each):
                with part:
                    loss = model(part.batch).square().mean()
                    healer.observe(loss)
                    (loss * part.weight).backward()
                    sizes.append(len(part.batch))
                failed += part.failed
            if number % 2:
                found = found or gradients()
                optimizer.step()
                optimizer.zero_grad()
    events = read(folder / "run.events.jsonl").events
    problem = next(event for event in events if event["kind"] == "fault")["problem"]
    assert "memory profile: " in problem, problem
    assert [*folder.glob("run.memory.*.txt")], "no memory profile"
    assert healer.step == 3
    assert failed > 0, "memory did not run out"
    assert max(sizes) < len(large), "the parts are not smaller"
    for one, other in zip(found, wanted, strict=True):
        difference = float((one - other).norm() / other.norm())
        assert difference < 1e-3, f"the gradient is not that of the whole window: {difference}"
    return {"samples": len(large), "samples_in_a_part": max(sizes), "failed_parts": failed}
