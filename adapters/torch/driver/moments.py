"""Resets the moments of torch's own optimizers, as if no step had been taken.

They create `state` (moments, and the step counter of the bias correction) at a parameter's first
step, so that an empty one is the start; only Adagrad creates it when it is built. Learning rates
and schedulers are not in `state`.
"""

from __future__ import annotations

import torch
from torch.optim import Adagrad, Optimizer

from healcore.torch.skipped_step import is_third_party


def obstacle(optimizer: Optimizer) -> str:
    """Why the moments cannot be reset; "" for an optimizer of torch.optim."""
    if not is_third_party(optimizer):
        return ""
    return (
        f"{type(optimizer).__name__} has a step() of its own, and only those of torch.optim are "
        "known to begin with an empty state"
    )


@torch.no_grad()
def reset(optimizer: Optimizer) -> None:
    """Sets the moments and step counters back to the start."""
    if not isinstance(optimizer, Adagrad):
        optimizer.state.clear()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            state["step"].zero_()
            state["sum"].fill_(group["initial_accumulator_value"])
