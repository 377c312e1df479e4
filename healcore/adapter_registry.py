"""Finds what each framework adapter provides to the rest of healcore, without importing the others.

Only this module names the adapters, and imports them only on demand. It is in the lowest layer, so
that the runtime can use it.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from typing import Any

from healcore.core.errors import HealcoreError

PROVIDED = {
    "driver": {
        "torch": "healcore.torch.driver:TorchDriver",
        "jax": "healcore.jax.driver.driver:JaxDriver",
    },
    "plain_values": {
        "torch": "healcore.torch.store.state",
        "jax": "healcore.jax.store.orbax",
    },
    "demo_training": {
        "torch": "healcore.torch.demo:train",
        "jax": "healcore.jax.demo:train",
    },
    "checkpoint_reader": {
        "torch": "healcore.torch.checkpoint_reader",
    },
}
"""Capability -> framework -> import path of the module or object."""


def find(framework: str, capability: str) -> Any:
    """Imports an adapter, and with it the framework, and returns its implementation.

    Raises:
        healcore.adapter_registry.MissingExtraError: the framework is not installed.
        KeyError: the framework is unknown, or its adapter lacks the capability.
    """
    return pkgutil.resolve_name(PROVIDED[capability][framework])


class MissingExtraError(HealcoreError, ImportError):
    """The framework that a part of healcore needs is not installed."""

    __module__ = "healcore.errors"


def require(extra: str, *modules: str) -> None:
    """Checks that the modules of an extra are installed, without importing them.

    Args:
        extra: name of the extra in pyproject.toml, for example "jax".
        *modules: top-level names of the modules in the extra, for example "jax", "optax".

    Raises:
        MissingExtraError: a module is missing. The message names it and the command to run.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"healcore.{extra} needs {', '.join(missing)}, which this environment lacks. "
            f"In a checkout of healcore run: pip install '.[{extra}]'",
            name=missing[0],
        )
