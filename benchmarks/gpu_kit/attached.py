"""`attach` with the device engine: decisions, waits, CUDA graphs, launches, half precision."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_kit.device import CUDA, DEVICE, NEEDS_CUDA, finish, no_waits, regression
from healcore.torch import attach

POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "pretraining": {},
    "autoclip": {"policy": "default", "clip": {"kind": "autoclip"}},
}
WARM_UP = 4
"""Steps that may wait: they compile, and the optimizer makes its state."""
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

    def __init__(self, policy: str, device: torch.device, **options: Any) -> None:
        given = POLICIES[policy]
        self.weights = [torch.nn.Parameter(torch.ones(n, device=device)) for n in (1, 5)]
        for each in self.weights:
            each.grad = torch.zeros_like(each)
        capturable = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-3, fused=True, capturable=capturable)
        overrides = {key: value for key, value in given.items() if key != "policy"}
        self.heal = attach(
            self.optimizer, given.get("policy", policy), console=False, **options, **overrides
        )
        self.loss = torch.zeros((), device=device)

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

    def state(self) -> Any:
        """The state of the engine."""
        return self.heal.state_dict()["state"]


def on_cpu(policy: str) -> Any:
    """The state of the engine after all signals, on the host."""
    run = Replayed(policy, torch.device("cpu"), engine="host")
    for step in range(len(SIGNALS)):
        run.give(step)
        run.step()
    return run.state()


def decisions() -> dict[str, Any]:
    """Eager and compiled: the state of the CPU, bit for bit, and no wait in a step."""
    compiled = [False, True] if CUDA else [False]
    for policy in POLICIES:
        wanted = on_cpu(policy)
        for compile in compiled:
            run = Replayed(policy, DEVICE, engine="device", compile=compile)
            for step in range(len(SIGNALS)):
                run.give(step)
                if step < WARM_UP:
                    run.step()
                else:
                    with no_waits():
                        run.step()
                        run.heal.metrics()
            assert run.heal.report().compiled is compile, "the compiler has failed"
            assert run.state() == wanted, f"{policy}, compile={compile}: other decisions"
    return {"policies": list(POLICIES), "compiled": compiled, "steps": len(SIGNALS)}


def cuda_graph() -> dict[str, Any]:
    """A captured step, replayed, has the state of the CPU, bit for bit."""
    if not CUDA:
        return NEEDS_CUDA
    for policy in POLICIES:
        wanted = on_cpu(policy)
        for compile in (False, True):
            run = Replayed(policy, DEVICE, engine="device", compile=compile)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for step in range(WARM_UP):
                    run.give(step)
                    run.step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run.step()
            for step in range(WARM_UP, len(SIGNALS)):
                run.give(step)
                graph.replay()
            assert run.state() == wanted, f"{policy}, compile={compile}: other decisions"
    return {"policies": list(POLICIES), "replays": len(SIGNALS) - WARM_UP}


def launches() -> dict[str, Any]:
    """Kernels that one optimizer step launches, of 192 tensors."""
    from torch.profiler import ProfilerActivity, profile

    def counted(how: str) -> int:
        weights = [torch.nn.Parameter(torch.ones(64, 64, device=DEVICE)) for _ in range(192)]
        optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)
        options: dict[str, Any] = {"engine": "device", "compile": CUDA and how != "attach, eager"}
        heal = attach(optimizer, "default", **options) if how.startswith("attach") else None
        loss = torch.ones((), device=DEVICE)

        for each in weights:
            each.grad = torch.full_like(each, 1e-3)

        def step() -> None:
            if heal is not None:
                heal.observe(loss)
            elif how == "clip_grad_norm_":
                torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            finish()

        for _ in range(WARM_UP):
            step()
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] * CUDA)]) as found:
            step()
        names = [each.name for each in found.events() or []]
        kind = ("cudaLaunchKernel", "cuLaunchKernel") if CUDA else ("aten::",)
        return sum(name.startswith(kind) for name in names)

    hows = ["nothing", "clip_grad_norm_", "attach", "attach, eager"]
    return {"counted": "kernel launches" if CUDA else "operations", **{h: counted(h) for h in hows}}


def grad_scaler() -> dict[str, Any]:
    """float16: an overflow is the scaler's to skip; no step waits."""
    model, batch, loss_fn = regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0)  # type: ignore[arg-type]
    heal = attach(optimizer, "default", engine="device", compile=CUDA, scaler=scaler)
    batches = [batch(number) for number in range(30)]
    kind = torch.float16 if CUDA else torch.bfloat16

    def step(number: int) -> None:
        with torch.autocast(DEVICE.type, dtype=kind):
            loss = loss_fn(batches[number])
        heal.observe(loss)
        scaler.scale(loss).backward()
        if number == 20:
            first: Tensor = next(model.parameters())
            assert first.grad is not None
            first.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for number in range(30):
        if number < WARM_UP:
            step(number)
        else:
            with no_waits():
                step(number)
    state = heal.state_dict()["state"]
    assert scaler.get_scale() == 512.0, scaler.get_scale()
    assert (state["step"], state["tally"]["alarms"]) == (29, 0), state["tally"]
    return {"dtype": str(kind), "overflows": 1}


def bfloat16() -> dict[str, Any]:
    """Weights and gradients in bfloat16: norms in float32, NaN skipped."""
    model, batch, loss_fn = regression()
    model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    heal = attach(optimizer, "default", engine="device", compile=CUDA)
    for number in range(30):
        x, y = batch(number)
        loss = loss_fn((x.bfloat16(), y)) * (math.nan if number == 20 else 1.0)
        heal.observe(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert heal.state_dict()["state"]["tally"]["skips"] == 1
    assert all(bool(torch.isfinite(each).all()) for each in model.parameters())
    return {"skips": 1}
