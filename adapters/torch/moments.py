"""Resets the moments of an optimizer, as if it had not taken a step."""

from __future__ import annotations

import inspect

import torch
from torch.optim import Adagrad, Optimizer


@torch.no_grad()
def reset_moments(optimizer: Optimizer) -> None:
    """Resets moments and step counters, as if the optimizer had not taken a step.

    torch's optimizers create `state` (moments, and the step counter of the bias correction) at a
    parameter's first step, so an empty `state` is the start. Only Adagrad creates its `state` in
    its constructor. Learning rates and schedulers are not in `state`.
    """
    if not isinstance(optimizer, Adagrad):
        optimizer.state.clear()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            state["step"].zero_()
            state["sum"].fill_(group["initial_accumulator_value"])


def is_third_party(optimizer: Optimizer) -> bool:
    """Whether the class defines `step()` outside of torch.optim.

    It may need the state that its constructor has made, so its moments cannot be reset.
    """
    return not inspect.unwrap(type(optimizer).step).__module__.startswith("torch.optim.")
