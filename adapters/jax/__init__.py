"""healcore for JAX: optax transformations that clip, skip and heal, decided on the device.

    tx = optax.chain(heal_zclip(), optax.adamw(1e-3))     # instead of clip_by_global_norm
    tx = protect(optax.adamw(1e-3), policy="default")     # exact skips, LR cuts
    updates, state = tx.update(grads, state, params, value=loss)

Import the helpers for Flax by name (`healcore.jax.flax_nnx`, `healcore.jax.flax_linen`), so that a
program without Flax does not load it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from healcore.extras import require

require("jax", "jax", "optax")

from healcore.core.engine import StateError  # noqa: E402
from healcore.core.signals import SignalError  # noqa: E402
from healcore.core.verdict import Action, Cause, Decision  # noqa: E402
from healcore.jax.commit import CommitError, commit  # noqa: E402
from healcore.jax.heal_state import HealState, HealStateError  # noqa: E402
from healcore.jax.opt_state import (  # noqa: E402
    expect_change,
    from_dict,
    gradient_norms,
    last_decision,
    metrics,
    on_rollback,
    to_dict,
    with_heal_state,
    without_heal_state,
)
from healcore.jax.optax_states import ScaleByHealLrState, scale_by_heal_lr, set_lr_scale  # noqa: E402
from healcore.jax.transform import ProtectState, heal, heal_zclip, protect  # noqa: E402

if TYPE_CHECKING:
    from healcore.jax.store import Keep, MemoryStore, OrbaxStore

__all__ = [
    "Action",
    "Cause",
    "CommitError",
    "Decision",
    "HealState",
    "HealStateError",
    "Keep",
    "MemoryStore",
    "OrbaxStore",
    "ProtectState",
    "ScaleByHealLrState",
    "SignalError",
    "StateError",
    "commit",
    "expect_change",
    "from_dict",
    "gradient_norms",
    "heal",
    "heal_zclip",
    "last_decision",
    "metrics",
    "on_rollback",
    "protect",
    "scale_by_heal_lr",
    "set_lr_scale",
    "to_dict",
    "with_heal_state",
    "without_heal_state",
]

_STORES = frozenset({"Keep", "MemoryStore", "OrbaxStore"})


def __getattr__(name: str) -> Any:
    """Imports the stores on first use (PEP 562): they load Orbax."""
    if name in _STORES:
        return getattr(importlib.import_module("healcore.jax.store"), name)
    raise AttributeError(f"module 'healcore.jax' has no attribute {name!r}; it has {__all__}")
