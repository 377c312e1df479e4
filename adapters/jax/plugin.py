"""Registers the parts of the JAX adapter (`healcore.adapter_registry`), imported on first use."""

from __future__ import annotations

import pkgutil
from functools import partial

from healcore.adapter_registry import register

_PARTS = {
    "driver": "healcore.jax.driver:JaxDriver",
    "plain_values": "healcore.jax.plain_values",
    "demo_training": "healcore.jax.demo:train",
}
"""Name of a part in the registry -> import path of its module or object."""

for _need, _where in _PARTS.items():
    register("jax", _need)(partial(pkgutil.resolve_name, _where))
