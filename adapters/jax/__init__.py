# The folder is adapters/jax. In a checkout healcore/jax is a link to it.
"""healcore for JAX: optax transformations that clip, skip and heal, decided on the device.

    tx = optax.chain(heal_zclip(), optax.adamw(1e-3))     # instead of clip_by_global_norm
    tx = protect(optax.adamw(1e-3), policy="default")     # exact skips, LR cuts
    updates, state = tx.update(grads, state, params, value=loss)

Import the helpers for Flax by name (`healcore.jax.flax_nnx`, `healcore.jax.flax_linen`), so that a
program without Flax does not load it.

The files, for readers of the code, in the order of a step:

    transform            `protect`, `heal`, `heal_zclip`: the optax transformations, and what
                         `protect` does in each step, from top to bottom
    optimizer_step       the optimizer's step, traced, whose old state a skip keeps; `commit`
    optax_states         moments, numbers and second iterates in the states of optax
    gradients            measures, scales and replaces gradients; the signals of a step
    heal_state           `HealState`, and the engine's step on it
    compilation          one compiled call of an eager step, one kernel of the engine on a CPU

    opt_state            finds, reads, saves and replaces the healing state in an optimizer state
    trees                nodes of a tree by kind or path, its leaves that are arrays, their forms
    flax_nnx             helpers for Flax nnx
    flax_linen           helpers for Flax linen

    driver               what a Healer needs of a run in JAX
    store                checkpoints
    demo                 the training of `healcore demo`
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from healcore.adapter_registry import require

require("jax", "jax", "optax")

from healcore.jax.heal_state import HealState, HealStateError  # noqa: E402
from healcore.jax.opt_state import (  # noqa: E402
    expect_change,
    from_dict,
    gradient_norms,
    last_decision,
    metrics,
    to_dict,
    with_heal_state,
    without_heal_state,
)
from healcore.jax.optimizer_step import commit  # noqa: E402
from healcore.jax.transform import heal, heal_zclip, protect, scale_by_heal_lr  # noqa: E402

if TYPE_CHECKING:
    from healcore.jax.store import OrbaxStore

__all__ = [
    "HealState",
    "HealStateError",
    "OrbaxStore",
    "commit",
    "expect_change",
    "from_dict",
    "gradient_norms",
    "heal",
    "heal_zclip",
    "last_decision",
    "metrics",
    "protect",
    "scale_by_heal_lr",
    "to_dict",
    "with_heal_state",
    "without_heal_state",
]


def __getattr__(name: str) -> Any:
    """Imports the store on first use (PEP 562): it loads Orbax."""
    if name == "OrbaxStore":
        return importlib.import_module("healcore.jax.store").OrbaxStore
    raise AttributeError(f"module 'healcore.jax' has no attribute {name!r}; it has {__all__}")
