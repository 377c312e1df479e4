"""`JAX`: the array namespace of the core for JAX arrays, traced or not.

A step of the core is traced into the user's compiled step, so these functions are written for the
program that XLA receives. `jnp.where`, `jnp.minimum` and others are jitted functions: each call
would be a call in that program, which XLA copies and inlines a hundred times. The functions here
are single operations of `jax.lax` instead, after the operands have one dtype and shape.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from healcore.core.array_namespace import Array, ArrayNamespace, Flag, Float, Int, Number, register

_ABOVE_SHARED = 1_000_003
"""A divisor that is larger than every shared value. It is not a power of two, which XLA would turn
into a cheap mask."""


class JaxNamespace(ArrayNamespace):
    """The functions of the core for JAX. `JAX` is the instance."""

    def __init__(self) -> None:
        super().__init__(jnp)

    def where(self, condition: Flag, x: Array | Number, y: Array | Number, /) -> Array:
        """`jnp.where` without its jitted call."""
        dtype = jnp.result_type(x, y)
        shape = jnp.broadcast_shapes(jnp.shape(condition), jnp.shape(x), jnp.shape(y))
        if_true = jnp.broadcast_to(jnp.asarray(x, dtype), shape)
        if_false = jnp.broadcast_to(jnp.asarray(y, dtype), shape)
        return lax.select(jnp.broadcast_to(condition, shape), if_true, if_false)

    def minimum(self, x: Array, y: Array | Number, /) -> Array:
        """`jnp.minimum` without its jitted call."""
        return lax.min(*_of_one_type(x, y))

    def maximum(self, x: Array, y: Array | Number, /) -> Array:
        """`jnp.maximum` without its jitted call."""
        return lax.max(*_of_one_type(x, y))

    def clip(self, x: Array, low: float, high: float, /) -> Array:
        """`jnp.clip` without its jitted call."""
        return lax.clamp(jnp.asarray(low, x.dtype), x, jnp.asarray(high, x.dtype))

    def flag(self, condition: Flag, flags: int, /) -> Int:
        """A selection, which is one operation less than the product of the default."""
        return self.where(condition, jnp.int32(flags), jnp.int32(0))

    def shared(self, x: Array, /) -> Array:
        """Makes XLA compute `x`, a bool or an int32 from 0 to a million, only once.

        XLA duplicates cheap operations into every consumer. For a few flags of a whole policy,
        1,700 operations became 18,000, and the compilation time grows in proportion. XLA does not
        duplicate a remainder, which counts as expensive. The remainder by a larger number is `x`.

        Alternatives fail: on a CPU XLA removes an optimization_barrier before fusion. A call that
        is not inlined, a `while` or a `cond` blocks the host or does not batch on other platforms.
        """
        number = lax.convert_element_type(x, jnp.int32)
        kept = lax.rem(number, lax.full_like(x, _ABOVE_SHARED, jnp.int32))
        if x.dtype == jnp.bool_:
            return lax.ne(kept, lax.full_like(kept, 0))
        return kept

    def shared_float(self, x: Float, /) -> Float:
        """Works as `shared`, for a finite float32 of at least +0: the remainder of its bits."""
        bits = lax.bitcast_convert_type(x, jnp.int32)
        kept = lax.rem(bits, lax.full_like(bits, jnp.iinfo(jnp.int32).max))
        return lax.bitcast_convert_type(kept, jnp.float32)


JAX = JaxNamespace()
"""The namespace of JAX arrays."""

register(jax.Array, lambda array: JAX)


def _of_one_type(x: Array, y: Array | Number) -> tuple[jax.Array, jax.Array]:
    """Both operands with the dtype and the shape of the result, as the functions of `lax` ask."""
    dtype = jnp.result_type(x, y)
    shape = jnp.broadcast_shapes(jnp.shape(x), jnp.shape(y))
    left = jnp.broadcast_to(jnp.asarray(x, dtype), shape)
    right = jnp.broadcast_to(jnp.asarray(y, dtype), shape)
    return left, right
