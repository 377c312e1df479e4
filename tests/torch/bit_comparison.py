"""Comparing parameters and optimizer state bit for bit: -0.0 is not 0.0, a NaN equals itself."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def bits(value: Any) -> Any:
    """Any value of an optimizer's state in a form that compares by bits."""
    if isinstance(value, Tensor):
        value = value.detach()
        if value.layout is not torch.strided:
            value = value.coalesce().to_dense()
        data = value.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()  # NumPy has no bfloat16
        return str(value.dtype), tuple(value.shape), data
    if isinstance(value, dict):
        return {key: bits(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [bits(each) for each in value]
    return repr(value)


def parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def snapshot(optimizer: Optimizer) -> dict[str, Any]:
    """Parameters, state of each parameter, and all hyper-parameters."""
    params = parameters(optimizer)
    return {
        "params": bits(params),
        "state": [bits(dict(optimizer.state.get(p, {}))) for p in params],
        "groups": [
            {k: bits(v) for k, v in group.items() if k != "params"}
            for group in optimizer.param_groups
        ],
    }


def assert_same(a: dict[str, Any], b: dict[str, Any], *parts: str) -> None:
    """Asserts equality of all parts, or of those named."""
    different = [part for part in parts or a if a[part] != b[part]]
    assert not different, f"not the same bits: {different}"
