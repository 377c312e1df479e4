"""Cuts of the learning rate: `reset_moments`, and optimizers that keep two iterates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import AdamW
from torch.testing import assert_close

from healcore.core.engine import Engine, LrConfig, RuleConfig
from healcore.core.verdict import Action, Cause
from healcore.torch import attach
from tests.torch import policies
from tests.torch.optimizer_cases import NAN, Where, host_and_device

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


def state_after(policy: Engine, where: Where = "host", steps: int = STEPS) -> dict[str, Any]:
    """AdamW's state after steps of which one has a gradient a thousand times as large."""
    parameter = Parameter(torch.zeros(3))
    optimizer = AdamW([parameter], lr=1e-2, fused=True)
    attach(optimizer, policy, engine=where)
    draw = torch.Generator().manual_seed(0)
    for i in range(steps):
        parameter.grad = torch.randn(3, generator=draw) * (1000.0 if i == SPIKE else 1.0)
        optimizer.step()
    return optimizer.state[parameter]


def test_the_step_after_the_cut_is_the_first_of_new_moments():
    assert int(state_after(CUTS, steps=SPIKE + 1)["step"]) == SPIKE + 1
    state = state_after(CUTS)
    assert int(state["step"]) == STEPS - SPIKE - 1
    assert float(state["exp_avg_sq"].max()) < 100


@host_and_device
@pytest.mark.parametrize("policy", [KEEPS, OBSERVES, SKIPS_TOO], ids=["off", "observe", "skipped"])
def test_otherwise_they_stay(policy: Engine, where: Where):
    assert int(state_after(policy, where)["step"]) == STEPS - (policy is SKIPS_TOO)


@pytest.mark.parametrize("name", ["AdamWScheduleFree", "SGDScheduleFree"])
def test_a_cut_reaches_both_iterates_of_a_schedule_free_optimizer(name: str):
    """They read the group's rate, so a cut is what a lower rate gives from that step on."""
    make = getattr(pytest.importorskip("schedulefree"), name)
    healed, plain = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    ours, theirs = make([healed], lr=0.1), make([plain], lr=0.1)
    heal = attach(ours, policies.CUTS)
    ours.train()
    theirs.train()
    scales = []
    for number in range(12):
        bad = number == 3
        healed.grad = torch.full((2,), NAN if bad else 2.0)
        plain.grad = torch.full((2,), 2.0)
        ours.step()
        scales.append(float(heal.metrics()["heal/lr_scale"]))
        if not bad:
            theirs.param_groups[0]["lr"] = 0.1 * scales[-1]
            theirs.step()
    assert min(scales) == 0.5
    assert_close(healed, plain)
    assert_close(ours.state[healed]["z"], theirs.state[plain]["z"])
