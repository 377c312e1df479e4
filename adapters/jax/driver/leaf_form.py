"""Gives restored leaves the form of the live ones, so that a compiled step is not compiled again.

A jitted function is compiled for dtypes, weak types and shardings, and for whether an array is
committed to its device. A checkpoint keeps only the dtypes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a Python number."""
    return type(leaf) in (bool, int, float)


def as_saved(leaf: Any) -> Any:
    """A leaf as it goes into a checkpoint: a Python number becomes the array that jit makes of it.

    A counter that starts as the number 0 (a TrainState's `step`) is an array after the first
    compiled step, and must match what was saved before. `SideState` keeps the number itself.
    """
    if not is_number(leaf):
        return leaf
    zero = jnp.asarray(type(leaf)())
    if zero.dtype == jnp.bool_:
        return jnp.asarray(leaf)
    limits = jnp.finfo(zero.dtype) if type(leaf) is float else jnp.iinfo(zero.dtype)
    # An Inf, also one by overflow, would make the checkpoint count as bad.
    return jnp.asarray(leaf) if abs(leaf) <= limits.max else zero


def form(leaf: Any) -> str:
    """Shape and dtype, in which a restored leaf and `as_saved` of the live one must agree."""
    return f"{leaf.dtype}{tuple(leaf.shape)}" if hasattr(leaf, "dtype") else "no array"


def as_live(new: Any, live: Any) -> Any:
    """A restored leaf in the form of the live one.

    Args:
        new: array or Python number.
        live: gives dtype, weak type, sharding and commitment. It may have been donated.
    """
    if is_number(live):
        return type(live)(np.asarray(new).item())
    if not isinstance(live, jax.Array):
        return new
    if jnp.issubdtype(live.dtype, jax.dtypes.prng_key):
        data = _placed(jax.random.key_data(new), live)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(new))
    if not isinstance(new, jax.Array):
        new = np.asarray(new, live.dtype)
    new = _placed(new, live)
    return _weak(new) if live.weak_type and not new.weak_type else new


def _placed(new: Any, live: jax.Array) -> jax.Array:
    """The array on the devices of the live one."""
    if isinstance(new, jax.Array) and new.committed == live.committed:
        return new if new.sharding == live.sharding else jax.device_put(new, live.sharding)
    if live.committed:
        return jax.device_put(new, live.sharding)
    return jnp.asarray(np.asarray(new))  # an array is uncommitted only if it comes from the host


def _weak(array: jax.Array) -> jax.Array:
    """The same numbers, weakly typed, like Python's."""
    zero = 0.0 if jnp.issubdtype(array.dtype, jnp.floating) else 0
    weak = jnp.full(array.shape, zero)
    if weak.dtype != array.dtype:
        return array
    return weak.at[...].set(array)
