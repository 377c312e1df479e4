"""How many functions healcore calls in a healthy step on the host: what a small net pays for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import healcore
from healcore.core.recorded import record
from healcore.torch import attach

OWN_FILES = (
    *(str(Path(each.__file__ or "").parent) + os.sep for each in (healcore, healcore.torch)),
    "<the engine's step, recorded>",
)
STEPS = 10
ATTACH, HEALER = 235, 434
"""Calls per step of `default`, 3 % above the count in CPython 3.11; later versions have fewer."""


def calls_per_step(step: Callable[[], object]) -> float:
    """Calls that healcore's own code and its recorded step make, of Python and of C functions."""
    calls = 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        file = frame.f_code.co_filename
        if event in ("call", "c_call"):
            calls += file.startswith(OWN_FILES)

    for _ in range(150):  # checks of a loop's first 100 steps
        step()
    sys.setprofile(count)
    try:
        for _ in range(STEPS):
            step()
    finally:
        sys.setprofile(None)
    return calls / STEPS


def training_step(observe: Callable[[Any], object], model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8)).square().mean()
    observe(loss)
    loss.backward()
    optimizer.step()


def net() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def test_a_step_with_attach():
    model, optimizer = net()
    heal = attach(optimizer)
    assert calls_per_step(lambda: training_step(heal.observe, model, optimizer)) <= ATTACH


def test_a_step_with_a_healer():
    model, optimizer = net()
    state = {"model": model, "optimizer": optimizer}
    checkpoints = healcore.Checkpoints(every=10**9)
    with healcore.Healer("default", state=state, checkpoints=checkpoints) as healer:

        def step() -> None:
            training_step(healer.observe, model, optimizer)
            healer.after_step()

        assert calls_per_step(step) <= HEALER


def test_a_recorded_function_converts_and_tests_scalars_without_a_call():
    """NumPy converts or tests a scalar in a time in which it adds ten."""
    from numpy import float32, int32

    def converted(count: Any, x: Any, *, xp: Any) -> Any:
        return xp.astype(count, xp.float32), xp.isfinite(x)

    program: Any = record(converted, int32(3), float32(1))
    assert not any(callable(each) for each in program.__kwdefaults__.values())
    for count in (0, 1, -1, 2**24 + 1, 2**24 + 3, -(2**31), 2**31 - 1):
        for x in (0.0, -3e38, 3.4028235e38, float("inf"), float("-inf"), float("nan")):
            found, finite = program(int32(count), float32(x))
            assert type(found) is float32
            assert found == int32(count).astype(float32)
            assert bool(finite) is bool(-3.4028235e38 <= x <= 3.4028235e38)
