"""Registers the torch adapter in `healcore.adapter_registry`; each part is imported on use."""

from __future__ import annotations

import pkgutil
from functools import partial

from healcore.adapter_registry import register

_PARTS = {
    "driver": "healcore.torch.driver:TorchDriver",
    "plain_values": "healcore.torch.plain_values",
    "demo_training": "healcore.torch.demo:train",
    "checkpoint_reader": "healcore.torch.probe_reader",
}

for _need, _place in _PARTS.items():
    register("torch", _need)(partial(pkgutil.resolve_name, _place))
