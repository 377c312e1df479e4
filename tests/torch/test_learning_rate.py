"""The learning rate is replaced for one step, and restored as the same object."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD
from torch.testing import assert_close

from healcore.torch import attach
from tests.torch import policies
from tests.torch.optimizer_cases import NAN, Where, host_and_device

SCALES = [0.5, 0.5, 0.5, 0.75, 1.0, 1.0]
"""After a cut to one half: hold_steps 3, ramp_steps 2."""


@host_and_device
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_a_cut_scales_the_update_of_every_group(where: Where, fused: bool, as_tensor: bool):
    def rate(value: float) -> Any:
        return torch.tensor(value) if as_tensor else value

    a, b = Parameter(torch.zeros(1)), Parameter(torch.zeros(1))
    groups = [{"params": [a], "lr": rate(1.0)}, {"params": [b], "lr": rate(4.0)}]
    optimizer = SGD(groups, fused=fused)
    own = [group["lr"] for group in optimizer.param_groups]
    heal = attach(optimizer, policies.CUTS, engine=where)
    a.grad, b.grad = torch.full((1,), NAN), torch.ones(1)
    optimizer.step()
    moved = []
    quiet = policies.CUTS.config.incident.quiet_steps
    for _ in range(quiet + len(SCALES)):
        before = a.item(), b.item()
        a.grad, b.grad = torch.ones(1), torch.ones(1)
        optimizer.step()
        moved.append((before[0] - a.item(), before[1] - b.item()))
        assert [g["lr"] for g in optimizer.param_groups] == own
        assert all(g["lr"] is o for g, o in zip(optimizer.param_groups, own, strict=True))
    scales = [x for x, _ in moved]
    assert set(scales) == {0.5, 0.75, 1.0}
    assert scales == sorted(scales)
    assert scales[-1] == 1.0
    assert [4 * x for x, _ in moved] == [y for _, y in moved]
    assert float(heal.metrics()["heal/lr_scale"]) == 1.0


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
