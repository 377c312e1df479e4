"""The bytes of the moments that an optimizer creates at its first step.

torch's optimizers create moments lazily. So the state at the start of a run is smaller than the
states that the run saves later: with AdamW it has a third of their size.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from healcore.torch import gradients
from healcore.torch.live_state import optimizers

_DEVICE_OPTIONS = ("fused", "foreach", "capturable", "differentiable")
"""Options that say how a step is computed, and may need an accelerator."""
_TRIAL_SIDE = 4
"""Rows and columns of the trial parameter."""


def missing_moments(state: Mapping[str, Any]) -> tuple[int, int] | None:
    """Bytes of the moments that the optimizers of a state have yet to create.

    Args:
        state: the state of the run.

    Returns:
        The bytes of all ranks together and of this process, or None if an optimizer is not torch's
        own, so that its moments are unknown.
    """
    whole = 0
    local = 0
    for optimizer in optimizers(state).values():
        if any(optimizer.state.values()):
            continue
        known: dict[torch.dtype, float] = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                if not p.requires_grad:
                    continue
                if p.dtype not in known:
                    found = _bytes_per_element(optimizer, group, p.dtype)
                    if found is None:
                        return None
                    known[p.dtype] = found
                whole += round(known[p.dtype] * p.numel())
                local += round(known[p.dtype] * gradients.local_part(p).numel())
    return whole, local


def _bytes_per_element(
    optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype
) -> float | None:
    """Bytes of moments for each element, from a step of a small parameter. None if unknown."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim"):
        return None
    accepted = inspect.signature(kind).parameters
    options: dict[str, Any] = {}
    for name, value in group.items():
        if name in accepted and name != "params" and name not in _DEVICE_OPTIONS:
            options[name] = value
    p = torch.nn.Parameter(torch.zeros(_TRIAL_SIDE, _TRIAL_SIDE, dtype=dtype))
    p.grad = torch.zeros_like(p)
    try:
        with torch.enable_grad():
            trial = kind([p], **options)
            trial.step()
    except Exception:  # a dtype or an option that needs an accelerator
        return None
    moments = [each for each in trial.state[p].values() if isinstance(each, torch.Tensor)]
    return sum(each.nbytes for each in moments if each.shape == p.shape) / p.numel()
