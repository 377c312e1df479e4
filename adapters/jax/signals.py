"""Makes one step's `Signals` from the arguments of `tx.update`, and checks them while tracing.

Under `jit` over sharded arrays a norm is global. Inside `shard_map`, `pmap` and a `vmap` with an
axis name, each device has only its part, and `Axes` reduces the signals over all devices.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from healcore.core.engine import Engine
from healcore.core.signals import SignalError, Signals
from healcore.jax.gradients import both_norms, gradient_leaves

AxisName = str | tuple[str, ...] | None

NAMES = ("value", *(name for name in Signals._fields if name not in ("loss", "group_norms")))
"""Keywords of `update` by which a caller reports signals; see `heal`."""
_MEANS = ("loss", "eval_loss", "update_norm", "learning_rate")
_FLAGS = ("change_expected", "externally_skipped")


def split_keywords(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits keywords of `update` into signals that are not None, and other keywords."""
    given = {name: keywords[name] for name in NAMES if keywords.get(name) is not None}
    return given, {name: each for name, each in keywords.items() if name not in NAMES}


def make_signals(
    engine: Engine, updates: Any, given: Mapping[str, Any], axes: Axes
) -> tuple[Signals, jax.Array | None]:
    """Makes one step's `Signals`, the same on every device, from its gradients and `given`.

    Also returns the norm of each gradient leaf, float32 (n,), or None if `given` has the global
    norm and the policy needs no others. Raises SignalError if a signal is not a 0-d number or bool.
    """
    inactive = [name for name, each in engine.config.detectors if "loss" in each.NEEDS]
    if "value" not in given and inactive:
        warnings.warn(
            f"no loss reaches healcore, so {', '.join(inactive)} of the policy are inactive and "
            "heal/loss is NaN: write tx.update(grads, opt_state, params, value=loss)",
            stacklevel=3,  # the caller of tx.update, outside of jit
        )
    if engine.mode == "observe":
        # Without a barrier, the norm and the optimizer's second moment share the squares of the
        # gradients, which XLA then writes to memory (the size of all parameters). In other modes
        # the scaling of the gradients prevents this.
        updates = jax.lax.optimization_barrier(updates)
    leaf_norms, grad_norm = None, given.get("grad_norm")
    if engine.per_tensor or grad_norm is None:
        # Computed even if no rule reads it, because no policy may accept a non-finite gradient.
        own_norm, leaf_norms = both_norms(updates)
        grad_norm = own_norm if grad_norm is None else grad_norm
        if not leaf_norms.size:
            leaf_norms = jnp.zeros((1,), jnp.float32)  # `count_leaves` returns at least 1
    reported = {**given, "grad_norm": grad_norm}
    found = {name: _scalar(name, reported.get(name)) for name in NAMES}
    signals = Signals(
        loss=found.pop("value"), group_norms=leaf_norms if engine.per_tensor else None, **found
    )
    return axes.signals(signals, leaf_norms, norm_reported="grad_norm" in given)


def count_leaves(params: Any) -> int:
    """Number of tensors with a gradient, at least one."""
    # optax.tree.map_params calls `init` with a placeholder that has no leaves, and expects a state
    # of the same structure.
    return max(1, len(gradient_leaves(params)))


class Axes(NamedTuple):
    """The axes of `shard_map` or `pmap` whose devices have to make the same decision."""

    averaged: tuple[str, ...] = ()
    """Axes along which gradients are equal (already averaged, as in data-parallel training)."""
    split: tuple[str, ...] = ()
    """Axes along which each device has its own part of the gradients."""

    @classmethod
    def of(cls, axis_name: AxisName, shard_axis_name: AxisName) -> Axes:
        """Makes the axes from a user's names. Raises TypeError for an invalid name."""
        axes = cls(
            _axis_names("axis_name", axis_name), _axis_names("shard_axis_name", shard_axis_name)
        )
        both = sorted(set(axes.averaged) & set(axes.split))
        if both:
            raise TypeError(
                f"axis {both[0]!r} is in axis_name and in shard_axis_name: along an axis, "
                "gradients are either equal (axis_name) or parts of a whole (shard_axis_name)"
            )
        return axes

    def __bool__(self) -> bool:
        return bool(self.averaged or self.split)

    def signals(
        self, own: Signals, leaf_norms: jax.Array | None, *, norm_reported: bool
    ) -> tuple[Signals, jax.Array | None]:
        """Reduces this device's signals and leaf norms over all devices, by one all-reduce.

        Losses and rates are averaged, norms are combined, and a flag is set if any device sets it.
        A NaN or Inf reaches every device. `norm_reported` is whether the caller passed `grad_norm`.
        """
        if not self:
            return own, leaf_norms
        names = [*_MEANS, *(["grad_norm"] if norm_reported else []), *_FLAGS]
        found = {name: getattr(own, name) for name in names if getattr(own, name) is not None}
        vector = [jnp.asarray(value, jnp.float32)[None] for value in found.values()]
        if leaf_norms is not None:
            vector.append(jnp.square(leaf_norms))
        total = jax.lax.psum(jnp.concatenate(vector), (*self.averaged, *self.split))
        devices = self._size(self.averaged + self.split)
        new = {name: total[i] / devices for i, name in enumerate(found)}
        new |= {name: new[name] > 0 for name in _FLAGS if name in new}
        if leaf_norms is not None:
            squares = total[len(found) :] / self._size(self.averaged)
            leaf_norms = jnp.sqrt(squares)
            if not norm_reported:
                new["grad_norm"] = jnp.sqrt(jnp.sum(squares))
        if own.group_norms is not None:
            new["group_norms"] = leaf_norms
        return own._replace(**new), leaf_norms

    def norm(self, tree: Any) -> jax.Array:
        """The global norm over all devices."""
        own, _ = both_norms(tree)
        if not self:
            return own
        total = jax.lax.psum(jnp.square(own), (*self.averaged, *self.split))
        return jnp.sqrt(total / self._size(self.averaged))

    def _size(self, names: tuple[str, ...]) -> int:
        return math.prod(jax.lax.axis_size(name) for name in names)


def _axis_names(argument: str, given: Any) -> tuple[str, ...]:
    names = () if given is None else (given,) if isinstance(given, str) else given
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{argument} must be the name of a mesh axis, or a tuple of names, got {given!r}: "
            f'write {argument}="data"'
        )
    return tuple(names)


def _scalar(name: str, value: Any) -> jax.Array | None:
    """Converts a signal to float32 or bool, 0-d. Returns None for None."""
    if value is None:
        return None
    try:
        dtype, shape = jax.dtypes.result_type(value), jnp.shape(value)
    except (TypeError, ValueError) as error:
        raise SignalError(
            f"{name} must be one number, got {type(value).__name__}: pass a 0-d array"
        ) from error
    is_flag = name in _FLAGS
    kind, write = ("bool", f"({name} != 0)") if is_flag else ("floating number", f"{name}.mean()")
    if shape or not jnp.issubdtype(dtype, jnp.bool_ if is_flag else jnp.floating):
        raise SignalError(
            f"{name} must be a 0-d {kind}, got {dtype} of shape {shape}: pass {name}={write}"
        )
    if is_flag:
        return jnp.asarray(value)
    with np.errstate(over="ignore"):  # a number beyond the range of float32 becomes Inf
        return jnp.asarray(value).astype(jnp.float32)
