"""`JAX`: the array namespace of the core for JAX arrays, traced or not.

A step of the core is traced into the user's compiled step, so the functions that differ from
`jax.numpy` are written for the program that XLA receives.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from healcore.core.array_namespace import Array, ArrayNamespace, Flag, Number, register


class JaxNamespace(ArrayNamespace):
    """The functions of the core for JAX. `JAX` is the instance."""

    def where(self, condition: Flag, x: Array | Number, y: Array | Number, /) -> Array:
        """`jnp.where` without its jitted call, which XLA would copy and inline a hundred times."""
        dtype = jnp.result_type(x, y)
        shape = jnp.broadcast_shapes(jnp.shape(condition), jnp.shape(x), jnp.shape(y))
        if_true = jnp.broadcast_to(jnp.asarray(x, dtype), shape)
        if_false = jnp.broadcast_to(jnp.asarray(y, dtype), shape)
        return lax.select(jnp.broadcast_to(condition, shape), if_true, if_false)

    def shared(self, x: Array, /) -> Array:
        """Makes XLA compute `x` only once: a bool, or an int32 or finite float32 of at least +0.

        XLA duplicates cheap operations into every consumer. For a few flags of a whole policy,
        1,700 operations became 18,000, and the compilation time grows in proportion. XLA does not
        duplicate a remainder, which counts as expensive. The remainder by a larger number is `x`,
        and no power of two, which would be a cheap mask.

        Alternatives fail: on a CPU XLA removes an optimization_barrier before fusion. A call that
        is not inlined, a `while` or a `cond` blocks the host or does not batch on other platforms.
        """
        if x.dtype == jnp.float32:
            bits = lax.bitcast_convert_type(x, jnp.int32)
        else:
            bits = lax.convert_element_type(x, jnp.int32)
        kept = lax.rem(bits, lax.full_like(bits, jnp.iinfo(jnp.int32).max))
        if x.dtype == jnp.float32:
            return lax.bitcast_convert_type(kept, jnp.float32)
        if x.dtype == jnp.bool_:
            return lax.ne(kept, lax.full_like(kept, 0))
        return kept


JAX = JaxNamespace(jnp)
"""The namespace of JAX arrays."""

register(jax.Array, lambda array: JAX)
