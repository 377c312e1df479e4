"""Saving, loading, rolling back, moving between engines, and the reset of the moments."""

import copy
import json
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import AdamW

from healcore.core.decision import Action, Cause
from healcore.core.engine import Engine, LrConfig, RuleConfig
from healcore.errors import StateError
from healcore.torch import Healing, attach
from tests.torch import policies
from tests.torch.bit_comparison import assert_same, parameters, snapshot
from tests.torch.optimizer_cases import HOST_AND_DEVICE, Case, host_and_device

CASE = Case("", torch.optim.AdamW, {"fused": True})
FACTORS = [1.0] * 6 + [float("nan"), 1.0, 1e5, 1.0, float("nan"), 1.0, 1.0, float("inf"), 1.0, 1.0]


def run(optimizer: Any, heal: Healing, steps: range) -> list[Any]:
    """Takes steps; returns the decision of each."""
    decisions = []
    for i in steps:
        CASE.step(optimizer, i, heal=heal, factor=FACTORS[i])
        decisions.append(heal.last_decision())
    return decisions


@pytest.mark.parametrize(
    ("first", "to", "stop"),
    [("host", "host", 2), ("host", "device", 7), ("device", "host", 11), ("device", "device", 7)],
)
def test_a_resumed_run_decides_as_one_that_never_stopped(first: Any, to: Any, stop: int):
    whole = CASE.build()
    heal = attach(whole, policies.EVERYTHING, engine=first)
    expected = run(whole, heal, range(len(FACTORS)))
    assert any(d.skip for d in expected[stop:])

    part = CASE.build()
    heal = attach(part, policies.EVERYTHING, engine=first)
    run(part, heal, range(stop))
    saved = json.dumps(heal.state_dict()), copy.deepcopy(part.state_dict())
    other = CASE.build()
    with torch.no_grad():
        for p, value in zip(parameters(other), parameters(part), strict=True):
            p.copy_(value)
    other.load_state_dict(saved[1])
    heal = attach(other, policies.EVERYTHING, engine=to)
    heal.load_state_dict(json.loads(saved[0]))
    assert run(other, heal, range(stop, len(FACTORS))) == expected[stop:]
    assert_same(snapshot(other), snapshot(whole))


@host_and_device
def test_a_rollback_keeps_the_cut_and_costs_one_recovery(where: Any):
    optimizer = CASE.build()
    heal = attach(optimizer, policies.CUTS, engine=where)
    run(optimizer, heal, range(5))
    saved = heal.state_dict()
    run(optimizer, heal, range(5, 8))
    live = heal.state_dict()
    engine = policies.CUTS
    heal.on_rollback(saved)
    both = (engine.from_dict(each) for each in (live, saved))
    assert heal.state_dict() == engine.to_dict(engine.on_rollback(*both))
    assert live["state"]["lr"]["scale"] == 0.5


@host_and_device
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        pytest.param(lambda d: None, "mapping", id="no mapping"),
        pytest.param(lambda d: {**d, "schema": 99}, "99", id="later schema"),
        pytest.param(lambda d: {**d, "policy": "0"}, "policy", id="another policy"),
        pytest.param(
            lambda d: {**d, "state": {**d["state"], "step": [1, 2]}}, "step", id="another shape"
        ),
    ],
)
def test_a_state_that_does_not_fit_loads_nothing(where: Any, broken: Any, message: str):
    optimizer = CASE.build()
    heal = attach(optimizer, policies.EVERYTHING, engine=where)
    run(optimizer, heal, range(3))
    before = heal.state_dict()
    for load in (heal.load_state_dict, heal.on_rollback):
        with pytest.raises(StateError, match=message):
            load(broken(copy.deepcopy(before)))
    assert heal.state_dict() == before


SPIKE, STEPS = 12, 40
RULE = RuleConfig(int(Cause.GRAD_SPIKE), action=int(Action.CUT_LR))
CUTS = Engine(
    policies.SKIPS.config._replace(
        rules=(RULE,), lr=LrConfig(factor=0.5, hold_steps=30, reset_moments=True)
    )
)
KEEPS = Engine(CUTS.config._replace(lr=CUTS.config.lr._replace(reset_moments=False)))
OBSERVES = Engine(CUTS.config._replace(mode="observe"))
SKIPS_TOO = Engine(CUTS.config._replace(rules=(RULE._replace(skip=True),)))


OTHERWISE = {KEEPS: STEPS, OBSERVES: STEPS, SKIPS_TOO: STEPS - 1}


@pytest.mark.parametrize(
    ("policy", "where", "steps"),
    [
        (CUTS, "host", STEPS - SPIKE - 1),
        *((policy, where, OTHERWISE[policy]) for policy in OTHERWISE for where in HOST_AND_DEVICE),
    ],
)
def test_the_step_after_a_cut_is_the_first_of_new_moments(policy: Engine, steps: int, where: Any):
    """Only where the policy resets them, and not after a step that was skipped."""
    parameter = Parameter(torch.zeros(3))
    draw = torch.Generator().manual_seed(0)
    optimizer = AdamW([parameter], lr=1e-2, fused=True)
    attach(optimizer, policy, engine=where)
    for i in range(STEPS):
        parameter.grad = torch.randn(3, generator=draw) * (1000.0 if i == SPIKE else 1.0)
        optimizer.step()
    state = optimizer.state[parameter]
    assert int(state["step"]) == steps
    assert (float(state["exp_avg_sq"].max()) < 100) == (policy in (CUTS, SKIPS_TOO))


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))],
    ids=["copy", "pickle"],
)
def test_a_handle_is_copied_with_what_holds_it_as_none(copied):
    """Programs keep it in their `args`, and trainers copy and save these."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    args = SimpleNamespace(lr=0.1, handle=attach(optimizer))
    with pytest.warns(UserWarning, match="belongs to the optimizer of one process"):
        other = copied(args)
    assert (other.lr, other.handle) == (0.1, None)
    assert args.handle.optimizer is optimizer
