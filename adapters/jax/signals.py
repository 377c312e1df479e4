"""Makes the core's `Signals` from the arguments of `tx.update`, checked while tracing."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from healcore.core.detectors import DETECTORS
from healcore.core.engine import Engine
from healcore.core.signals import SignalError, Signals
from healcore.jax.norms import both_norms, gradient_leaves


def make_signals(
    updates: Any,
    *,
    per_tensor: bool,
    value: ArrayLike | None = None,
    eval_loss: ArrayLike | None = None,
    grad_norm: ArrayLike | None = None,
    update_norm: ArrayLike | None = None,
    change_expected: ArrayLike | None = None,
    externally_skipped: ArrayLike | None = None,
    learning_rate: ArrayLike | None = None,
) -> tuple[Signals, chex.Array | None]:
    """Makes one step's `Signals`.

    Args:
        updates: the gradients; their norm is taken in float32.
        per_tensor: ``engine.per_tensor``; take one norm per leaf as well.
        value: training loss, one floating number of any precision, or None.
        eval_loss: evaluation loss; NaN at a step without one.
        grad_norm: the global norm, where this process does not have all gradients (inside
            shard_map it has to be reduced over the mesh first).
        update_norm: global norm of the last applied update.
        change_expected: bool, the host announces a change of LR, batch, data or weights.
        externally_skipped: bool, skip this step, which is neither learnt nor counted.
        learning_rate: the schedule's rate at this step, for a limit in absolute terms.

    Returns:
        Signals of float32 and bool 0-d arrays, None for what is absent; and the norm of each
        gradient leaf, float32 (n,), None where the caller passes the global one.

    Raises:
        SignalError: a signal is not one number of the right kind.
    """
    leaf_norms = None
    if per_tensor or grad_norm is None:
        # Always, whatever the rules read: no policy may accept a non-finite gradient.
        own_norm, leaf_norms = both_norms(updates)
        grad_norm = own_norm if grad_norm is None else grad_norm
        if not leaf_norms.size:
            leaf_norms = jnp.zeros((1,), jnp.float32)  # as `count_leaves` has it
    signals = Signals(
        loss=_number("value", value),
        grad_norm=_number("grad_norm", grad_norm),
        update_norm=_number("update_norm", update_norm),
        eval_loss=_number("eval_loss", eval_loss),
        group_norms=leaf_norms if per_tensor else None,
        change_expected=_flag("change_expected", change_expected),
        externally_skipped=_flag("externally_skipped", externally_skipped),
        learning_rate=_number("learning_rate", learning_rate),
    )
    return signals, leaf_norms


def warn_if_no_loss(engine: Engine, value: Any) -> None:
    """Warns, while tracing, where the policy reads the loss and none is passed."""
    inactive = [name for name, _ in engine.config.detectors if "loss" in DETECTORS[name].NEEDS]
    if value is None and inactive:
        warnings.warn(
            f"no loss is passed to tx.update, so {', '.join(inactive)} of the policy are "
            "inactive and heal/loss is NaN: write tx.update(grads, opt_state, params, value=loss)",
            stacklevel=_callers(),
        )


def _callers() -> int:
    """The stack level of the user's own call: the first frame outside healcore, optax and Flax."""
    frame, level = sys._getframe(1), 1
    while frame is not None:
        top = frame.f_globals.get("__name__", "").partition(".")[0]
        if top not in ("healcore", "optax", "flax"):
            return level
        frame, level = frame.f_back, level + 1
    return 1


def count_leaves(params: Any) -> int:
    """Number of tensors with a gradient."""
    # At least one: optax.tree.map_params initialises with a placeholder that has no leaves, and
    # must get a state of the same structure.
    return max(1, len(gradient_leaves(params)))


def _number(name: str, value: Any) -> chex.Array | None:
    if value is None:
        return None
    dtype = _dtype(name, value)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise SignalError(
            f"{name} must be a floating number, got {dtype}: "
            f"pass {name}=jnp.asarray({name}, jnp.float32) if it is one"
        )
    _one(name, value)
    return jnp.asarray(value).astype(jnp.float32)


def _flag(name: str, value: Any) -> chex.Array | None:
    if value is None:
        return None
    dtype = _dtype(name, value)
    if dtype != jnp.bool_:
        raise SignalError(f"{name} must be a bool, got {dtype}: pass {name}=({name} != 0)")
    _one(name, value)
    return jnp.asarray(value)


def _dtype(name: str, value: Any) -> Any:
    try:
        return jax.dtypes.result_type(value)
    except (TypeError, ValueError) as error:
        raise SignalError(
            f"{name} must be one number, got {type(value).__name__}: pass a 0-d array"
        ) from error


def _one(name: str, value: Any) -> None:
    if jnp.shape(value) != ():
        raise SignalError(
            f"{name} must be one number, got shape {jnp.shape(value)}: reduce it over the batch "
            f"first, for example {name}={name}.mean()"
        )
