"""Measures what holds how much memory, after a run has run out of memory or on request."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from healcore.torch import gradients
from healcore.torch.live_state import State, tensors_in


def memory_of(state: State, optimizers: Sequence[Optimizer]) -> dict[str, int]:
    """Measures the memory of each kind of tensors, see `Driver.memory`.

    Args:
        state: the state of the run. Frozen parameters of its modules count too.
        optimizers: the optimizers of the state, without wrappers.

    Returns:
        "parameters", "gradients" and "optimizer state" -> bytes in the memory of this rank. With
        CUDA also "activations": what remains of the allocated memory.
    """
    params = {*tensors_in(state)}
    moments = tensors_in([optimizer.state for optimizer in optimizers])
    owners = {
        "parameters": _size(params),
        "gradients": _size(p.grad for p in params if p.grad is not None),
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


def _size(tensors: Iterable[Tensor]) -> int:
    """Bytes in the memory of this rank."""
    return sum(gradients.local_part(tensor).nbytes for tensor in tensors)
