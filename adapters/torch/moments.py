"""Resets the moments of torch's own optimizers, as if no step had been taken.

They create `state` (moments, and the step counter of the bias correction) at a parameter's first
step, so that an empty one is the start; only Adagrad creates it when it is built. Learning rates
and schedulers are not in `state`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Adagrad, Optimizer

from healcore.torch.incident_log import EVERY
from healcore.torch.measurement import AsyncCopy
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


class CutsOnDevice:
    """Whether the device has cut the learning rate, read late enough that nobody waits.

    Read 10 to 19 steps after a cut. Which step that is depends on the number of steps alone, not on
    what has arrived: every rank has to reset its moments at the same one.
    """

    def __init__(self) -> None:
        self._flags: list[Tensor] = []
        self._pending: AsyncCopy | None = None

    def add(self, cut: Tensor) -> bool:
        """Takes a step's flag (0-d float32); whether the flags that are due have a cut."""
        if cut.is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # the replays of a CUDA graph run no hooks
        self._flags.append(cut)
        if len(self._flags) < EVERY:
            return False
        due, self._pending = self._pending, AsyncCopy(torch.stack(self._flags).amax())
        self._flags = []
        return due is not None and bool(due.read())
