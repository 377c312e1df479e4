"""The array namespace that the core runs on under JAX: `jax.numpy`, and `shared`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

float32, int32, bool = jnp.float32, jnp.int32, jnp.bool_
arange, cumsum, asarray = jnp.arange, jnp.cumsum, jnp.asarray
where, isfinite, abs, sqrt, sum, astype = (
    jnp.where,
    jnp.isfinite,
    jnp.abs,
    jnp.sqrt,
    jnp.sum,
    jnp.astype,
)

_BEYOND = 1_000_003
"""Above every shared value, and not a power of two: XLA would turn that into a cheap mask."""


def shared(x: Any) -> Any:
    """The same bool, or int32 from 0 to a million, computed by XLA only once.

    XLA copies cheap operations into everything that depends on them, here on a few flags: 1,700
    operations became 18,000, and compiling took as much longer. A remainder counts as expensive and
    is not copied. (On a CPU XLA removes an optimization_barrier before it fuses. A call that is not
    inlined, a `while` or a `cond` would work there, but blocks the host or does not batch
    elsewhere.)
    """
    flag = x.dtype == jnp.bool_
    kept = lax.rem(lax.convert_element_type(x, jnp.int32), lax.full_like(x, _BEYOND, jnp.int32))
    return lax.ne(kept, lax.full_like(kept, 0)) if flag else kept
