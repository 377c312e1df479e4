"""What the framework adapters provide to the neutral part of healcore.

Only this module names the adapters, and imports them only on demand. It is in the lowest layer, so
that the runtime can use it.
"""

from __future__ import annotations

import pkgutil
from typing import Any

PROVIDED = {
    "driver": {
        "torch": "healcore.torch.driver:TorchDriver",
        "jax": "healcore.jax.driver.driver:JaxDriver",
    },
    "plain_values": {
        "torch": "healcore.torch.plain_values",
        "jax": "healcore.jax.plain_values",
    },
    "demo_training": {
        "torch": "healcore.torch.demo:train",
        "jax": "healcore.jax.demo:train",
    },
    "checkpoint_reader": {
        "torch": "healcore.torch.probe_reader",
    },
}
"""Capability -> framework -> import path of the module or object."""


def find(framework: str, capability: str) -> Any:
    """Imports an adapter, and with it the framework, and returns its implementation.

    Raises:
        healcore.extras.MissingExtraError: the framework is not installed.
        KeyError: the framework is unknown, or its adapter lacks the capability.
    """
    return pkgutil.resolve_name(PROVIDED[capability][framework])
