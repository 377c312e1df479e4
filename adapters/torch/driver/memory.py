"""Measures what holds how much memory, after a run has run out of memory or on request."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from healcore.torch import gradients
from healcore.torch.live_state import State


def memory_of(state: State, optimizers: Sequence[Optimizer]) -> dict[str, int]:
    """Measures the memory of each kind of tensors, see `Driver.memory`.

    Args:
        state: the state of the run. Frozen parameters of its modules count too.
        optimizers: the optimizers of the state, without wrappers.

    Returns:
        "parameters", "gradients" and "optimizer state" -> bytes in the memory of this rank. With
        CUDA also "activations": what remains of the allocated memory.
    """
    params: set[Tensor] = set()
    for optimizer in optimizers:
        params.update(gradients.parameters(optimizer))
    for value in state.values():
        if isinstance(value, nn.Module):
            params.update(value.parameters())
    moments: list[Any] = []
    for optimizer in optimizers:
        for of_parameter in optimizer.state.values():
            moments += of_parameter.values()
    owners = {
        "parameters": _size(params),
        "gradients": _size(p.grad for p in params),
        "optimizer state": _size(moments),
    }
    if torch.cuda.is_initialized():
        owners["activations"] = max(0, torch.cuda.memory_allocated() - sum(owners.values()))
    return owners


def cuda_profiles() -> dict[str, bytes]:
    """CUDA's own reports about its memory, see `Driver.memory_profiles`.

    Returns:
        ".txt" -> CUDA's summary. Also ".pickle" -> its snapshot, if the program records the
        history of allocations; https://pytorch.org/memory_viz shows it. Empty on a CPU.
    """
    if not torch.cuda.is_initialized():
        return {}
    profiles = {".txt": torch.cuda.memory_summary().encode()}
    snapshot = torch.cuda.memory._snapshot()
    if any(snapshot.get("device_traces", ())):
        profiles[".pickle"] = pickle.dumps(snapshot)
    return profiles


def _size(values: Iterable[Any]) -> int:
    """Bytes of the tensors among these values, in the memory of this rank."""
    size = 0
    for value in values:
        if isinstance(value, Tensor):
            size += gradients.local_part(value).nbytes
    return size
