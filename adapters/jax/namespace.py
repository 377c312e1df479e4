"""The array namespace of the core under JAX: functions of `jax.numpy`, and `shared`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

float32, int32, bool = jnp.float32, jnp.int32, jnp.bool_
arange, cumsum, asarray = jnp.arange, jnp.cumsum, jnp.asarray
abs, sqrt, sum, astype = jnp.abs, jnp.sqrt, jnp.sum, jnp.astype

_BEYOND = 1_000_003
"""A divisor above every shared value. XLA would turn a power of two into a cheap mask."""


def where(condition: Any, x: Any, y: Any) -> Any:
    """`jnp.where` without its jitted call, which XLA would copy and inline a hundred times."""
    dtype = jnp.result_type(x, y)
    shape = jnp.broadcast_shapes(*map(jnp.shape, (condition, x, y)))
    x, y = (jnp.broadcast_to(jnp.asarray(each, dtype), shape) for each in (x, y))
    return lax.select(jnp.broadcast_to(condition, shape), x, y)


def reciprocal(x: Any) -> Any:
    """1 / x for a floating array; `jnp.reciprocal` may multiply by a power."""
    return lax.div(lax.full_like(x, 1), x)


def _of_two(operation: Any) -> Any:
    """`jnp.minimum` or `jnp.maximum` without its jitted call."""

    def apply(x: Any, y: Any) -> Any:
        dtype, shape = jnp.result_type(x, y), jnp.broadcast_shapes(jnp.shape(x), jnp.shape(y))
        return operation(*(jnp.broadcast_to(jnp.asarray(n, dtype), shape) for n in (x, y)))

    return apply


minimum, maximum = _of_two(lax.min), _of_two(lax.max)


def clip(x: Any, low: float, high: float) -> Any:
    """`jnp.clip` without its jitted call."""
    return lax.clamp(jnp.asarray(low, x.dtype), x, jnp.asarray(high, x.dtype))


def flag(condition: Any, flags: int) -> Any:
    """`flags` as int32 where the condition holds, else 0."""
    return where(condition, jnp.int32(flags), jnp.int32(0))


def shared(x: Any) -> Any:
    """Makes XLA compute `x`, a bool or an int32 from 0 to a million, only once.

    XLA duplicates cheap operations into every consumer. For a few flags of a whole policy, 1,700
    operations became 18,000, and the compilation time grows in proportion. XLA does not duplicate
    a remainder, which counts as expensive.

    Alternatives fail: on a CPU XLA removes an optimization_barrier before fusion. A call that is
    not inlined, a `while` or a `cond` blocks the host or does not batch on other platforms.
    """
    flag = x.dtype == jnp.bool_
    kept = lax.rem(lax.convert_element_type(x, jnp.int32), lax.full_like(x, _BEYOND, jnp.int32))
    return lax.ne(kept, lax.full_like(kept, 0)) if flag else kept


def shared_float(x: Any) -> Any:
    """As `shared`, for a finite float32 of at least +0."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    kept = lax.rem(bits, lax.full_like(bits, jnp.iinfo(jnp.int32).max))
    return lax.bitcast_convert_type(kept, jnp.float32)
