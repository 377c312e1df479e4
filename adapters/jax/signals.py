"""Makes one step's `Signals` from its gradients and from what the caller of `update` reports.

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
from healcore.jax.trees import PyTree

AxisName = str | tuple[str, ...] | None
"""A name of a mesh axis, several names, or None for no axis."""

SIGNAL_KEYWORDS = (
    "value",
    *(name for name in Signals._fields if name not in ("loss", "group_norms")),
)
"""Keywords of `update` by which a caller reports signals; see `heal`."""
_MEANS = ("loss", "eval_loss", "learning_rate")
_FLAGS = ("change_expected", "externally_skipped")


def split_keywords(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits the keywords of `update` into signals for healcore and keywords for the optimizer.

    Args:
        keywords: the keywords of a call of `update`.

    Returns:
        The signals by the names in `SIGNAL_KEYWORDS`, without signals that are None; and all other
        keywords.
    """
    signals = {}
    for name in SIGNAL_KEYWORDS:
        if keywords.get(name) is not None:
            signals[name] = keywords[name]
    others = {}
    for name, value in keywords.items():
        if name not in SIGNAL_KEYWORDS:
            others[name] = value
    return signals, others


def checked(given: Mapping[str, Any], engine: Engine) -> dict[str, jax.Array]:
    """Converts the signals that the caller of `update` passes, and warns of a missing loss.

    Args:
        given: the signals, by the keywords of `SIGNAL_KEYWORDS`.
        engine: the engine of the policy.

    Raises:
        SignalError: a signal is not a 0-d number or bool.
    """
    inactive = []
    for name, detector in engine.config.detectors:
        if "loss" in detector.NEEDS:
            inactive.append(name)
    if "value" not in given and inactive:
        warnings.warn(
            f"no loss reaches healcore, so the policy's {', '.join(inactive)} cannot act and "
            "heal/loss is NaN: write tx.update(grads, opt_state, params, value=loss)",
            stacklevel=3,  # the caller of tx.update, outside of jit
        )
    return {name: _scalar(name, value) for name, value in given.items()}


def make_signals(
    engine: Engine,
    updates: PyTree,
    given: Mapping[str, jax.Array],
    axes: Axes,
    bad_update: Any = None,
) -> tuple[Signals, jax.Array | None]:
    """Makes one step's `Signals`, the same on every device.

    Args:
        engine: the engine of the policy.
        updates: the gradients.
        given: result of `checked`.
        axes: the mesh axes over which signals are reduced.
        bad_update: whether the optimizer would make NaN or Inf of the gradients, bool 0-d or None.
            If it is True, the global norm is NaN, so that the policy treats the step as a step
            with a NaN in its gradients. The norms of the leaves stay the gradients' norms.

    Returns:
        The signals; and the norm of each gradient leaf, float32 (n,), or None if `given` has the
        global norm and the policy needs no others.
    """
    if engine.mode == "observe":
        # Without a barrier, the norm and the optimizer's second moment share the squares of the
        # gradients, which XLA then writes to memory (the size of all parameters). In other modes
        # the scaling of the gradients prevents this.
        updates = jax.lax.optimization_barrier(updates)
    found = dict.fromkeys(SIGNAL_KEYWORDS) | dict(given)
    leaf_norms = None
    if engine.per_tensor or "grad_norm" not in given:
        # Computed even if no rule reads it, because no policy may accept a non-finite gradient.
        own_norm, leaf_norms = both_norms(updates)
        found["grad_norm"] = given.get("grad_norm", own_norm)
        if not leaf_norms.size:
            leaf_norms = jnp.zeros((1,), jnp.float32)  # `count_leaves` returns at least 1
    group_norms = None
    if engine.per_tensor:
        group_norms = leaf_norms
    signals = Signals(loss=found.pop("value"), group_norms=group_norms, **found)
    signals, leaf_norms = axes.reduce(signals, leaf_norms, norm_reported="grad_norm" in given)
    if bad_update is not None:
        if axes.names:
            bad_update = jax.lax.psum(bad_update.astype(jnp.int32), axes.names) > 0
        norm: Any = signals.grad_norm
        signals = signals._replace(grad_norm=jnp.where(bad_update, jnp.nan, norm))
    return signals, leaf_norms


def count_leaves(params: PyTree) -> int:
    """Number of tensors with a gradient, at least one.

    Orbax cannot save an empty array, and the healing state has an array over these tensors.

    Args:
        params: the parameters, as passed to ``tx.init``.
    """
    # optax.tree.map_params calls `init` with a placeholder that has no leaves, and expects a state
    # of the same structure.
    return max(1, len(gradient_leaves(params)))


class Axes(NamedTuple):
    """The axes of `shard_map` or `pmap` whose devices have to make the same decision.

    Within these transformations each device runs the step on its own part of the data. If one
    device skipped a step and another did not, their parameters would differ from then on.
    """

    averaged: tuple[str, ...] = ()
    """Axes along which gradients are equal (already averaged, as in data-parallel training)."""
    split: tuple[str, ...] = ()
    """Axes along which each device has its own part of the gradients."""

    @property
    def names(self) -> tuple[str, ...]:
        """All axes."""
        return (*self.averaged, *self.split)

    @classmethod
    def of(cls, axis_name: AxisName, shard_axis_name: AxisName) -> Axes:
        """Makes the axes from the arguments of `heal` or `protect`.

        Args:
            axis_name: name or names of the axes along which gradients are equal, or None.
            shard_axis_name: name or names of the axes along which gradients are parts, or None.

        Raises:
            TypeError: a name is in both arguments.
        """
        axes = cls(_axis_names(axis_name), _axis_names(shard_axis_name))
        both = sorted(set(axes.averaged) & set(axes.split))
        if both:
            raise TypeError(
                f"axis {both[0]!r} is in axis_name and in shard_axis_name: along an axis, "
                "gradients are either equal (axis_name) or parts of a whole (shard_axis_name)"
            )
        return axes

    def reduce(
        self, own: Signals, leaf_norms: jax.Array | None, *, norm_reported: bool
    ) -> tuple[Signals, jax.Array | None]:
        """Reduces this device's signals and leaf norms over all devices, by one all-reduce.

        Losses and rates are averaged, norms are combined, and a flag is set if any device sets it.
        A NaN or Inf reaches every device.

        Args:
            own: the signals of this device, 0-d.
            leaf_norms: norm of each gradient leaf on this device, float32 (n,), or None.
            norm_reported: whether the caller passed `grad_norm`.

        Returns:
            The signals and the norms of the whole step, equal on all devices.
        """
        if not self.names:
            return own, leaf_norms
        names = [*_MEANS, *_FLAGS]
        if norm_reported:
            names.append("grad_norm")
        values = {}
        for name in names:
            value = getattr(own, name)
            if value is not None:
                values[name] = jnp.asarray(value, jnp.float32)
        squares = None
        if leaf_norms is not None:
            squares = jnp.square(leaf_norms)
        values, squares = jax.lax.psum((values, squares), self.names)
        new = {}
        for name, total in values.items():
            new[name] = total > 0 if name in _FLAGS else total / self._size(self.names)
        if squares is not None:
            squares /= self._size(self.averaged)
            leaf_norms = jnp.sqrt(squares)
            if not norm_reported:
                new["grad_norm"] = jnp.sqrt(jnp.sum(squares))
        if own.group_norms is not None:
            new["group_norms"] = leaf_norms
        return own._replace(**new), leaf_norms

    def _size(self, names: tuple[str, ...]) -> int:
        """The number of devices along some axes."""
        return math.prod(jax.lax.axis_size(name) for name in names)


def _axis_names(given: AxisName) -> tuple[str, ...]:
    """The names that a user passes, as a tuple."""
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


def _scalar(name: str, value: Any) -> jax.Array:
    """Converts a signal to float32 or bool, 0-d."""
    try:
        dtype, shape = jax.dtypes.result_type(value), jnp.shape(value)
    except (TypeError, ValueError) as error:
        raise SignalError(
            f"{name} must be one number, got {type(value).__name__}: pass a 0-d array"
        ) from error
    is_flag = name in _FLAGS
    if is_flag:
        wanted, kind, write = jnp.bool_, "bool", f"({name} != 0)"
    else:
        wanted, kind, write = jnp.floating, "floating number", f"{name}.mean()"
    if shape or not jnp.issubdtype(dtype, wanted):
        raise SignalError(
            f"{name} must be a 0-d {kind}, got {dtype} of shape {shape}: pass {name}={write}"
        )
    if is_flag:
        return jnp.asarray(value)
    with np.errstate(over="ignore"):  # a number beyond the range of float32 becomes Inf
        return jnp.asarray(value).astype(jnp.float32)
