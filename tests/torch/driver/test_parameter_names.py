"""Names of parameters that several modules of the state share."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from healcore.torch.live_state import parameter_names


class Average(nn.Module):
    """An average that also holds the model itself, as `ema_pytorch.EMA`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.online, self.average = model, copy.deepcopy(model).requires_grad_(False)


model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
tail = copy.deepcopy(model).requires_grad_(False)
tail[0] = model[0]  # an average that shares the frozen part


@pytest.mark.parametrize(
    "modules",
    [
        {"model": model, "ema": Average(model)},
        {"ema": Average(model), "model": model},
        {"ema": tail, "model": model},
        {"model": model, "ema": tail},
        {"model": model, "again": nn.Sequential(*model)},
    ],
)
def test_a_parameter_has_the_name_of_the_model_rather_than_of_its_average(modules):
    params = list(model.parameters())
    state = {**modules, "optimizer": torch.optim.SGD(params, 0.1)}
    assert {name.split(".")[0] for name in parameter_names(state, params)} == {"model"}
