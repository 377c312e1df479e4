"""Saving, loading, rolling back, moving between engines and frameworks, and detaching."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch

from healcore.errors import StateError
from healcore.torch import Healing, attach
from tests.torch import policies
from tests.torch.bit_comparison import assert_same, snapshot
from tests.torch.optimizer_cases import HOST_AND_DEVICE, Case, Where, host_and_device

CASE = Case("", torch.optim.AdamW, {"fused": True})
FACTORS = [1.0] * 6 + [float("nan"), 1.0, 1e5, 1.0, float("nan"), 1.0, 1.0, float("inf"), 1.0, 1.0]


def run(optimizer: Any, heal: Healing, steps: range) -> list[Any]:
    """Takes steps; returns the decision of each."""
    decisions = []
    for i in steps:
        CASE.step(optimizer, i, heal=heal, factor=FACTORS[i])
        decisions.append(heal.last_decision())
    return decisions


@pytest.mark.parametrize("to", HOST_AND_DEVICE)
@pytest.mark.parametrize("first", HOST_AND_DEVICE)
@pytest.mark.parametrize("stop", [2, 7, 11])
def test_a_resumed_run_decides_as_one_that_never_stopped(first: Where, to: Where, stop: int):
    whole = CASE.build()
    heal = attach(whole, policies.EVERYTHING, engine=first)
    expected = run(whole, heal, range(len(FACTORS)))
    assert any(d.skip for d in expected[stop:])

    part = CASE.build()
    heal = attach(part, policies.EVERYTHING, engine=first)
    run(part, heal, range(stop))
    saved = json.dumps(heal.state_dict()), copy.deepcopy(part.state_dict())
    params = [p.detach().clone() for p in part.param_groups[0]["params"]]

    other = CASE.build()
    with torch.no_grad():
        for p, value in zip(other.param_groups[0]["params"], params, strict=True):
            p.copy_(value)
    other.load_state_dict(saved[1])
    heal = attach(other, policies.EVERYTHING, engine=to)
    heal.load_state_dict(json.loads(saved[0]))
    assert run(other, heal, range(stop, len(FACTORS))) == expected[stop:]
    assert_same(snapshot(other), snapshot(whole))


@host_and_device
def test_a_rollback_keeps_the_cut_and_costs_one_recovery(where: Where):
    optimizer = CASE.build()
    heal = attach(optimizer, policies.CUTS, engine=where)
    run(optimizer, heal, range(5))
    saved = heal.state_dict()
    run(optimizer, heal, range(5, 8))
    live = heal.state_dict()["state"]
    assert live["lr"]["scale"] == 0.5
    heal.on_rollback(saved)
    state = heal.state_dict()["state"]
    assert state["lr"] == live["lr"]
    paid = {**live["budget"], "recoveries": live["budget"]["recoveries"] - 1}
    assert state["budget"] == paid
    assert state["detectors"] == saved["state"]["detectors"]
    assert state["detectors"] != live["detectors"]


@host_and_device
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda d: None, "mapping"),
        (lambda d: {**d, "schema": 99}, "99"),
        (lambda d: {**d, "clip": "fixed"}, "policy"),
        (lambda d: {**d, "state": {**d["state"], "step": [1, 2]}}, "shape"),
    ],
)
def test_a_state_that_does_not_fit_loads_nothing(where: Where, broken: Any, message: str):
    optimizer = CASE.build()
    heal = attach(optimizer, policies.EVERYTHING, engine=where)
    run(optimizer, heal, range(3))
    before = heal.state_dict()
    for load in (heal.load_state_dict, heal.on_rollback):
        with pytest.raises(StateError, match=message):
            load(broken(copy.deepcopy(before)))
    assert heal.state_dict() == before
