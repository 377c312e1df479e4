"""healcore: one policy that heals training runs, the same in JAX and in torch.

Importing this package imports neither JAX nor torch (a test holds it to that). The parts load when
they are first named: `healcore.policy`, `healcore.jax`, `healcore.torch`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from healcore import jax, policy, torch
    from healcore.runtime.healer import Healer
    from healcore.runtime.loop.exits import RunStopped

__version__ = "0.1.0"
__all__ = ["Healer", "RunStopped", "__version__", "jax", "policy", "torch"]

_PARTS = frozenset({"jax", "policy", "torch"})
_NAMES = {"Healer": "healcore.runtime.healer", "RunStopped": "healcore.runtime.loop.exits"}


def __getattr__(name: str) -> Any:
    """Imports a part on first use (PEP 562), so that `healcore.torch.attach(...)` just works."""
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    if name in _PARTS:
        return importlib.import_module(f"healcore.{name}")
    raise AttributeError(f"module 'healcore' has no attribute {name!r}; it has {sorted(__all__)}")
