"""With a `loss_fn` several devices and processes decide as one does, on the same global batches."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.jax.compared_processes import FAULT, FAULTS, SECONDS
from tests.jax.processes import Program

TOLERANCE = {"damage": 1e-3, "healthy": 1e-5}
"""Relative, of losses: several devices add up in another order than one. Damaged weights multiply
the difference. At 100 times the rate training is chaotic: those current weights differ."""


def program(world: int, devices: int = 1) -> Program:
    module = "tests.jax.compared_processes"
    return Program(module, str(devices), *FAULTS, world=world, seconds=SECONDS + 30)


@pytest.fixture(scope="module")
def one() -> Program:
    return program(1)


def check(found: Any, one: Any, fault: str) -> None:
    assert len(found["rollbacks"]) == len(one["rollbacks"])
    for mine, expected in zip(found["rollbacks"], one["rollbacks"], strict=True):
        chaotic = {"step": 0, "checkpoint": 0} if fault == "rate" else {}
        assert {**mine, **chaotic} == {**expected, **chaotic}
        # At 100 times the rate training is chaotic: the last bits decide the size of a bet.
        assert abs(mine["step"] - expected["step"]) <= (20 if fault == "rate" else 0)
    same_until = FAULT + 10 if fault == "rate" else math.inf
    assert found["lr_scale"] == one["lr_scale"]
    assert found["norm"] == pytest.approx(one["norm"], rel=1e-4)
    for mine, expected in zip(found["compared"], one["compared"], strict=fault in TOLERANCE):
        if expected["steps"][0] >= same_until:
            break
        assert mine["steps"] == expected["steps"]
        assert mine["anchor"] == expected["anchor"]
        assert mine["then"] == pytest.approx(expected["then"], rel=1e-5)
        if fault in TOLERANCE:
            assert mine["now"] == pytest.approx(expected["now"], rel=TOLERANCE[fault], nan_ok=True)


def test_one_device_goes_back_from_faults_only(one: Program):
    [damage], [rate], [healthy] = (one.of(fault) for fault in FAULTS)
    assert [each["checkpoint"] for each in damage["rollbacks"]] in ([40], [60])  # before the fault
    assert damage["rollbacks"][0]["lr_limit"] is None
    assert [each["checkpoint"] for each in rate["rollbacks"]] in ([40], [60])
    assert rate["lr_scale"] == pytest.approx(0.01)
    assert healthy["rollbacks"] == []
    assert sum(each["steps"][0] >= FAULT for each in healthy["compared"]) > 3


@pytest.mark.slow
def test_four_devices_of_one_process_decide_as_one(one: Program):
    found = program(1, devices=4)
    for fault in FAULTS:
        check(found.of(fault)[0], one.of(fault)[0], fault)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_decide_as_one(world: int, one: Program):
    found = program(world)
    for fault in FAULTS:
        outcomes = found.of(fault)
        assert all(each == outcomes[0] for each in outcomes)  # to the bit
        check(outcomes[0], one.of(fault)[0], fault)
