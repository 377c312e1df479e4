"""Heals training runs in JAX and in torch by one policy.

Importing this package imports neither JAX nor torch. Each submodule (`healcore.policy`,
`healcore.jax`, `healcore.torch`, `healcore.errors`) and each other name is imported on first use.
"""

from __future__ import annotations

# ruff: noqa: F403, F405 - `__all__` lists the names, and a test imports each of them
import importlib
import warnings
from typing import TYPE_CHECKING, Any

from healcore.core.errors import HealcoreError

if TYPE_CHECKING:
    from healcore import errors, jax, policy, torch
    from healcore.api import *

__version__ = "0.5.0.dev0"
__all__ = [
    "Action",
    "Cause",
    "CheckpointStore",
    "Checkpoints",
    "Cursor",
    "DataError",
    "Decision",
    "Fault",
    "HealcoreError",
    "Healer",
    "Hooks",
    "IncidentContext",
    "Keep",
    "Logging",
    "PolicyError",
    "RunStopped",
    "StoreError",
    "Tracker",
    "__version__",
    "classify",
    "errors",
    "jax",
    "policy",
    "retrying",
    "start",
    "torch",
]

_SUBMODULES = frozenset({"errors", "jax", "policy", "torch"})


def __getattr__(name: str) -> Any:
    """Imports a submodule or a name of `healcore.api` on first use (PEP 562)."""
    if name in _SUBMODULES:
        return importlib.import_module(f"healcore.{name}")
    if name == "Cursor":
        warnings.warn(
            "healcore.Cursor is deprecated, and healcore 0.6 removes it: write "
            "`for batch in healer.batches(loader)`, which reads, skips and goes back",
            DeprecationWarning,
            stacklevel=2,
        )
    if name in __all__:
        return getattr(importlib.import_module("healcore.api"), name)
    hint = f"it has {sorted(__all__)}"
    if name.endswith("Store"):
        hint = "stores are per framework: healcore.jax.OrbaxStore, healcore.torch.DCPStore, ..."
    raise AttributeError(f"module 'healcore' has no attribute {name!r}; {hint}")
