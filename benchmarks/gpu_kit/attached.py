"""`attach` with the device engine: decisions, waits, launches, half precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_kit import device
from healcore.torch import attach

POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "pretraining": {},
    "autoclip": {"policy": "default", "clip": {"kind": "autoclip"}},
}
WARM_UP = 4
"""Steps that may wait: the optimizer makes its state."""
WARM = 24
"""Steps after which everything has run that a step runs, also the reads every 10 steps."""
SIGNALS = [(2.0 - i / 100, 1.0 + (i * 7 % 5) / 10) for i in range(40)]
"""Loss and gradient norm of each step."""
for _step, _harm in {
    24: (math.nan, 1.0),
    27: (1.7, math.nan),
    30: (1e4, 1.0),
    33: (1.7, 1e5),
    36: (math.inf, math.inf),
}.items():
    SIGNALS[_step] = _harm


class Replayed:
    """An optimizer whose gradients have exactly the norms of `SIGNALS`."""

    def __init__(self, policy: str, place: torch.device, **options: Any) -> None:
        given = POLICIES[policy]
        self.weights = [torch.nn.Parameter(torch.ones(n, device=place)) for n in (1, 5)]
        for each in self.weights:
            each.grad = torch.zeros_like(each)
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-3, fused=True)
        overrides = {key: value for key, value in given.items() if key != "policy"}
        self.heal = attach(
            self.optimizer, given.get("policy", policy), console=False, **options, **overrides
        )
        self.loss = torch.zeros((), device=place)

    def give(self, step: int) -> None:
        """Writes the loss and the gradients of a step, without a wait."""
        loss, norm = SIGNALS[step]
        self.loss.fill_(loss)
        assert self.weights[0].grad is not None
        self.weights[0].grad.fill_(norm)

    def step(self) -> None:
        """One step."""
        self.heal.observe(self.loss)
        self.optimizer.step()

    def compare(self, wanted: Replayed, what: str) -> None:
        """AssertionError if the engine's state has other bits, or the weights other values."""
        states = [each.heal.state_dict()["state"] for each in (self, wanted)]
        assert states[0] == states[1], f"{what}: other decisions"
        for one, other in zip(self.weights, wanted.weights, strict=True):
            here, there = one.detach().cpu(), other.detach().cpu()
            assert torch.allclose(here, there, rtol=1e-5), f"{what}: not enforced, {here}, {there}"


def on_cpu(policy: str) -> Replayed:
    """The run on the host, after all signals."""
    run = Replayed(policy, torch.device("cpu"), engine="host")
    for step in range(len(SIGNALS)):
        run.give(step)
        run.step()
    return run


def decisions() -> dict[str, Any]:
    """State and weights of the CPU, and no wait in a step."""
    for policy in POLICIES:
        wanted = on_cpu(policy)
        run = Replayed(policy, device.DEVICE, engine="device")
        for step in range(len(SIGNALS)):
            run.give(step)
            if step < WARM_UP:
                run.step()
            else:
                with device.no_waits():
                    run.step()
                    if not run.heal.live_engine.judges_late:  # else it waits for the step
                        run.heal.metrics()
        run.compare(wanted, policy)
    return {"policies": list(POLICIES), "steps": len(SIGNALS)}


def launches() -> dict[str, Any]:
    """Operations, launches and kernels of one optimizer step, of 192 tensors."""
    hows = ["nothing", "clip_grad_norm_", "default", "zclip"]
    found: dict[str, Any] = {"tensors": 192, "dispatches": {}}
    for how in hows:
        step = _step_of(how)
        with device.CountDispatches() as counted:
            step()
        found["dispatches"][how] = counted.count
    few, clip, late, many = (found["dispatches"][how] for how in hows)
    assert 0 < few < late < many, "the operations were not counted"
    assert late <= clip + 8, "a step of `default` has more than a norm and a finite test"
    if not device.CUDA:
        return found
    for how in hows:
        step = _step_of(how)
        found[how] = _profiled(step)
    assert found["nothing"]["kernels"] > 0, "the profiler has seen no kernel"
    return found


def _step_of(how: str) -> Callable[[], None]:
    """An optimizer step that has warmed up."""
    weights = [torch.nn.Parameter(torch.ones(64, 64, device=device.DEVICE)) for _ in range(192)]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)
    heal = attach(optimizer, how, engine="device") if how in ("default", "zclip") else None
    loss = torch.ones((), device=device.DEVICE)
    for each in weights:
        each.grad = torch.full_like(each, 1e-3)

    def step() -> None:
        if heal is not None:
            heal.observe(loss)
        elif how == "clip_grad_norm_":
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()

    for _ in range(WARM_UP):
        step()
    device.finish()
    return step


def _profiled(step: Callable[[], object]) -> dict[str, int]:
    """The work of one step. The step before it warms up the profiler."""
    from torch.profiler import ProfilerActivity, profile, schedule

    plan = schedule(wait=0, warmup=1, active=1, repeat=1)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], schedule=plan) as found:
        for _ in range(2):
            step()
            device.finish()
            found.step()
    return device.work_of(found.events() or [])


def grad_scaler() -> dict[str, Any]:
    """float16: an overflow is the scaler's to skip; no whole step waits."""
    model, batch, loss_fn = device.regression()
    kind = device.DEVICE.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler(kind, init_scale=1024.0)  # type: ignore[arg-type]
    heal = attach(optimizer, "default", engine="device", scaler=scaler)
    batches = [batch(number) for number in range(30)]
    dtype = torch.float16 if device.CUDA else torch.bfloat16
    before: list[Tensor] = []

    def step(number: int) -> None:
        with torch.autocast(kind, dtype=dtype):
            loss = loss_fn(batches[number])
        heal.observe(loss)
        scaler.scale(loss).backward()
        if number == 20:
            first: Tensor = next(model.parameters())
            assert first.grad is not None
            first.grad.fill_(math.inf)
            before[:] = [each.detach().clone() for each in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if number == 20:
            before.extend(each.detach().clone() for each in model.parameters())

    for number in range(30):
        if number < WARM_UP:
            step(number)
        else:
            with device.no_waits(asleep=number >= WARM):
                step(number)
    state = heal.state_dict()["state"]
    assert scaler.get_scale() == 512.0, scaler.get_scale()
    assert (state["step"], state["tally"]["alarms"]) == (29, 0), state["tally"]
    half = len(before) // 2
    same = all(torch.equal(a, b) for a, b in zip(before[:half], before[half:], strict=True))
    assert half > 0, "there was no overflow"
    assert same, "the overflow has moved the weights"
    return {"dtype": str(dtype), "overflows": 1}


def bfloat16() -> dict[str, Any]:
    """Weights and gradients in bfloat16: a NaN is skipped, and no whole step waits."""
    model, batch, loss_fn = device.regression()
    model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    heal = attach(optimizer, "default", engine="device")
    batches = [batch(number) for number in range(30)]

    def step(number: int) -> None:
        x, y = batches[number]
        loss = loss_fn((x.bfloat16(), y)) * (math.nan if number == 20 else 1.0)
        heal.observe(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(30):
        if number < WARM_UP:
            step(number)
        else:
            with device.no_waits():
                step(number)
    assert heal.state_dict()["state"]["tally"]["skips"] == 1
    assert all(bool(torch.isfinite(each).all()) for each in model.parameters())
    return {"skips": 1}
