"""Encodes torch's own values as JSON, for `healcore.runtime.store.values` and for checkpoints.

Names from a file are looked up in tables, never with `getattr`.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch

DTYPES = {
    str(each).removeprefix("torch."): each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype)
}
"""Name in files, such as "float32", -> dtype."""


def dtype_name(tensor: torch.Tensor) -> str:
    """The name of a tensor's dtype in files, such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def node_of(value: Any) -> dict[str, Any] | None:
    """Encodes a dtype, device, size or dense tensor; None for other values. Ignores the device."""
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        return None
    plain = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
    data = base64.b64encode(plain.view(torch.uint8).numpy().tobytes()).decode()
    node = {"dtype": dtype_name(value), "shape": list(value.shape), "bytes": data}
    is_parameter = type(value) is torch.nn.Parameter
    return node | ({"parameter": value.requires_grad} if is_parameter else {})


def value_of(content: dict[str, Any]) -> Any:
    """Decodes a value of `node_of`, on the CPU. Malformed content may raise any exception."""
    if "device" in content:
        return torch.device(content["device"])
    if "size" in content:
        return torch.Size(content["size"])
    dtype = DTYPES[content["dtype"]]
    if "bytes" not in content:
        return dtype
    data = np.frombuffer(base64.b64decode(content["bytes"]), np.uint8).copy()
    flat = torch.from_numpy(data).view(dtype) if len(data) else torch.empty(0, dtype=dtype)
    found = flat.reshape(content["shape"])
    if "parameter" not in content:
        return found
    return torch.nn.Parameter(found, requires_grad=bool(content["parameter"]))
