"""A cut of the learning rate in optimizers that keep two iterates."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter
from torch.testing import assert_close

from healcore.torch import attach
from tests.torch import policies
from tests.torch.optimizer_cases import NAN


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
