"""`attach`: what it accepts, what it rejects, and the error without torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Linear, Parameter
from torch.optim import AdamW

from healcore.errors import ParametersChangedError
from healcore.policy import PolicyError
from healcore.torch import AttachError, attach
from tests.torch import policies


def optimizer(**options: Any) -> AdamW:
    return AdamW([Parameter(torch.ones(2))], **options)


@pytest.mark.parametrize("given", [None, Linear(2, 2)], ids=type)
def test_a_value_that_is_no_optimizer_is_rejected(given: Any):
    with pytest.raises(AttachError, match="whose step"):
        attach(given, policies.SKIPS)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"engine": "gpu"}, AttachError),
        ({"scaler": 1024.0}, AttachError),
        ({"clip": {"max_norm": -1}}, PolicyError),
    ],
)
def test_a_wrong_option_changes_nothing(options: dict[str, Any], error: type[BaseException]):
    o = optimizer()
    with pytest.raises(error, match=next(iter(options))):
        attach(o, "zclip", **options)
    assert not o._optimizer_step_pre_hooks
    attach(o, policies.SKIPS)


def test_one_optimizer_has_one_policy():
    o = optimizer()
    heal = attach(o, policies.SKIPS)
    with pytest.raises(AttachError, match="healed already"):
        attach(o, policies.SKIPS)
    heal.detach()
    attach(o, policies.SKIPS)


def test_removed_parameters_are_refused_where_each_has_a_history():
    o = optimizer()
    o.add_param_group({"params": [Parameter(torch.ones(3))]})
    attach(o, policies.ADAGC)
    first = o.param_groups[0]["params"][0]
    first.grad = torch.ones(2)
    del o.param_groups[1]
    with pytest.raises(ParametersChangedError, match="parameters"):
        o.step()
    assert torch.equal(first.detach(), torch.ones(2))
