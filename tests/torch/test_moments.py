"""`reset_moments`: after a cut or a rollback a torch optimizer steps as a new one does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim
from torch.nn import Parameter
from torch.optim import AdamW

from healcore.core.engine import Engine, LrConfig, RuleConfig
from healcore.core.verdict import Action, Cause
from healcore.torch import attach
from healcore.torch.enforcer import moments_obstacle, reset_moments
from tests.torch import policies
from tests.torch.bit_comparison import bits, parameters
from tests.torch.optimizer_cases import CASES, Case, Where, host_and_device

SPIKE, STEPS = 12, 40
CUTS = Engine(
    policies.SKIPS.config._replace(
        rules=(RuleConfig(int(Cause.GRAD_SPIKE), action=int(Action.CUT_LR)),),
        lr=LrConfig(factor=0.5, hold_steps=30, reset_moments=True),
    )
)
KEEPS = Engine(CUTS.config._replace(lr=CUTS.config.lr._replace(reset_moments=False)))
OBSERVES = Engine(CUTS.config._replace(mode="observe"))
SKIPS_TOO = Engine(
    CUTS.config._replace(rules=(CUTS.config.rules[0]._replace(skip=True),)),
)


def run(
    policy: Engine,
    where: Where = "host",
    steps: int = STEPS,
) -> Any:
    """An optimizer after `steps` steps, of which one has a gradient a thousand times as large."""
    parameter = Parameter(torch.zeros(3))
    optimizer = AdamW([parameter], lr=1e-2, fused=True)
    attach(optimizer, policy, engine=where)
    draw = torch.Generator().manual_seed(0)
    for i in range(steps):
        parameter.grad = torch.randn(3, generator=draw) * (1000.0 if i == SPIKE else 1.0)
        optimizer.step()
    return optimizer


def counted(optimizer: Any) -> int:
    (state,) = optimizer.state.values()
    return int(state["step"])


def test_the_step_after_the_cut_is_the_first_of_new_moments():
    assert counted(run(CUTS)) == STEPS - SPIKE - 1
    assert counted(run(CUTS, steps=SPIKE + 1)) == SPIKE + 1
    state = run(CUTS).state
    assert all(float(each["exp_avg_sq"].max()) < 100 for each in state.values())


@host_and_device
@pytest.mark.parametrize("policy", [KEEPS, OBSERVES, SKIPS_TOO], ids=["off", "observe", "skipped"])
def test_otherwise_they_stay(policy: Engine, where: Where):
    assert counted(run(policy, where)) == STEPS - (policy is SKIPS_TOO)


# -- the reset itself -----------------------------------------------------------------------------

FROM_A_HALF = {"initial_accumulator_value": 0.5, "lr_decay": 0.1}


@pytest.mark.parametrize(
    "case", [*CASES, Case("Adagrad-half", optim.Adagrad, FROM_A_HALF)], ids=lambda case: case.name
)
def test_it_goes_on_as_a_new_optimizer(case: Case):
    ours, theirs = case.build(), case.build()
    for i in range(4):
        case.step(ours, i)
    assert moments_obstacle(ours) == ""
    reset_moments(ours)
    with torch.no_grad():
        for used, new in zip(parameters(ours), parameters(theirs), strict=True):
            new.copy_(used)
    for i in range(10, 14):
        case.step(ours, i)
        case.step(theirs, i)
        assert bits(parameters(ours)) == bits(parameters(theirs))
