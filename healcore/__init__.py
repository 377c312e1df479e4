"""healcore: one policy that heals training runs, the same in JAX and in torch.

Importing this package imports neither JAX nor torch (a test holds it to that). The parts load when
they are first named: `healcore.policy`, `healcore.jax`, `healcore.torch`; so do `Healer` and all
other names in it.
"""

from __future__ import annotations

# ruff: noqa: F403, F405 - the names are listed below, and a test imports each of them
import importlib
from typing import TYPE_CHECKING, Any

from healcore.core.errors import HealcoreError

if TYPE_CHECKING:
    from healcore import errors, jax, policy, torch
    from healcore.api import *

__version__ = "0.1.0"
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
    "torch",
]

_PARTS = frozenset({"errors", "jax", "policy", "torch"})


def __getattr__(name: str) -> Any:
    """Imports a part on first use (PEP 562), so that `healcore.torch.attach(...)` just works."""
    if name in _PARTS:
        return importlib.import_module(f"healcore.{name}")
    if name in __all__:
        return getattr(importlib.import_module("healcore.api"), name)
    has = f"it has {sorted(__all__)}"
    if name.endswith("Store"):
        has = "the stores are of a framework: healcore.jax.OrbaxStore, healcore.torch.DCPStore, ..."
    raise AttributeError(f"module 'healcore' has no attribute {name!r}; {has}")
