"""Measures what holds how much memory, after a run has run out of memory or on request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from healcore.torch import gradients
from healcore.torch.live_state import State, tensors_in


def memory_profile(state: State, optimizers: Sequence[Optimizer]) -> bytes:
    """Lists the bytes of the parameters, gradients and moments, and CUDA's own summary.

    Args:
        state: the state of the run. Frozen parameters of its modules count too.
        optimizers: the optimizers of the state, without wrappers.
    """
    params = {*tensors_in(state)}
    owners = {
        "parameters": params,
        "gradients": [p.grad for p in params if p.grad is not None],
        "optimizer state": tensors_in([optimizer.state for optimizer in optimizers]),
    }
    text = "".join(f"{_size(tensors):>20,} bytes  {name}\n" for name, tensors in owners.items())
    if torch.cuda.is_initialized():
        text += f"\n{torch.cuda.memory_summary()}"
    return text.encode()


def _size(tensors: Iterable[Tensor]) -> int:
    """Bytes in the memory of this rank."""
    return sum(gradients.local_part(tensor).nbytes for tensor in tensors)
