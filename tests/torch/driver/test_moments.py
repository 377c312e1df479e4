"""`[rollback] reset_moments`: after it a torch optimizer steps as a new one does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim
from torch.nn import Parameter

from healcore.torch.enforcer import moments_obstacle, reset_moments

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "AdamW": lambda p: optim.AdamW(p, lr=0.1, amsgrad=True),
    "fused": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5, lr_decay=0.1),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.1, centered=True, momentum=0.9),
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.1),
    "Adamax": lambda p: optim.Adamax(p, lr=0.1),
    "NAdam": lambda p: optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: optim.RAdam(p, lr=0.1),
    "ASGD": lambda p: optim.ASGD(p, lr=0.1),
    "Rprop": lambda p: optim.Rprop(p, lr=0.1),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.1),
    "LBFGS": lambda p: optim.LBFGS(p, lr=0.1, max_iter=1),
}


def step(optimizer: Any, parameter: Parameter, seed: int) -> None:
    grad = torch.randn(3, 2, generator=torch.Generator().manual_seed(seed))

    def closure() -> torch.Tensor:
        parameter.grad = grad.clone()
        return (parameter.detach() * grad).sum()

    closure()
    optimizer.step(closure)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_goes_on_as_a_new_optimizer(name):
    used = Parameter(torch.ones(3, 2))
    ours = OPTIMIZERS[name]([used])
    for seed in range(4):
        step(ours, used, seed)
    new = Parameter(used.detach().clone())
    theirs = OPTIMIZERS[name]([new])
    assert moments_obstacle(ours) == ""
    reset_moments(ours)
    for seed in range(10, 14):
        step(ours, used, seed)
        step(theirs, new, seed)
        assert torch.equal(used, new)


def test_an_optimizer_of_somebody_else_is_refused():
    class Own(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    assert "Own" in moments_obstacle(Own([Parameter(torch.ones(1))], lr=0.1))
