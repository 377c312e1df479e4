"""healcore for JAX: optax transformations that clip, skip and heal, decided on the device.

    tx = optax.chain(heal_zclip(), optax.adamw(1e-3))     # instead of clip_by_global_norm
    tx = protect(optax.adamw(1e-3), policy="default")     # exact skips, LR cuts
    updates, state = tx.update(grads, state, params, value=loss)

`healcore.jax.flax_nnx` and `healcore.jax.flax_linen` hold the helpers for Flax; import them by
name, so that a program without Flax never loads it.
"""

from __future__ import annotations

from healcore.extras import require

require("jax", "jax", "optax", "chex")

from healcore.core.signals import SignalError  # noqa: E402
from healcore.core.verdict import Action, Cause, Decision  # noqa: E402
from healcore.jax.commit import CommitError, commit  # noqa: E402
from healcore.jax.decision import decision_of, gradient_norms, metrics  # noqa: E402
from healcore.jax.lr import ScaleByHealLrState, scale_by_heal_lr, set_lr_scale  # noqa: E402
from healcore.jax.norms import global_norm, leaf_norms  # noqa: E402
from healcore.jax.protect import ProtectState, protect  # noqa: E402
from healcore.jax.state import HealState, HealStateError  # noqa: E402
from healcore.jax.state_transfer import announce, from_dict, on_rollback, to_dict  # noqa: E402
from healcore.jax.stripping import attach, strip  # noqa: E402
from healcore.jax.transform import heal, heal_zclip  # noqa: E402

__all__ = [
    "Action",
    "Cause",
    "CommitError",
    "Decision",
    "HealState",
    "HealStateError",
    "ProtectState",
    "ScaleByHealLrState",
    "SignalError",
    "announce",
    "attach",
    "commit",
    "decision_of",
    "from_dict",
    "global_norm",
    "gradient_norms",
    "heal",
    "heal_zclip",
    "leaf_norms",
    "metrics",
    "on_rollback",
    "protect",
    "scale_by_heal_lr",
    "set_lr_scale",
    "strip",
    "to_dict",
]
