"""How healcore's operations reach XLA: in one compiled call, as one kernel, and few of them.

`JAX` is the array namespace of the core for JAX arrays. A step of the core is traced into the
user's compiled step, so the functions that differ from `jax.numpy` are written for the program that
XLA receives.

The arrays among the arguments are traced. Every other leaf is a constant of the compiled function:
a number of the policy, a function, a text.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.experimental.xla_metadata import set_xla_metadata

from healcore.core.array_namespace import (
    Array,
    ArrayNamespace,
    Flag,
    Int,
    Number,
    register,
)
from healcore.jax.trees import PyTree, is_array

Result = TypeVar("Result")
_ARRAY = object()
"""Stands for an array among the constants."""


def in_one_call(function: Callable[..., Result], *args: PyTree) -> Result:
    """Calls a function of pytrees: within `jit` as it is, outside of it as one compiled call.

    The function runs under the standard promotion of dtypes, because under the user's
    ``jax_numpy_dtype_promotion="strict"`` a sum of a bool and an int32 raises.

    Args:
        function: a pure function. A new function object is compiled again.
        args: its arguments.
    """
    with jax.numpy_dtype_promotion("standard"):
        leaves, structure = jax.tree.flatten(args)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            return function(*args)
        constants = tuple(_ARRAY if is_array(leaf) else leaf for leaf in leaves)
        return _call(function, structure, constants, list(filter(is_array, leaves)))


def in_one_kernel(function: Callable[..., Result], *args: PyTree) -> Result:
    """Calls a function of short arrays as one kernel, where the device is a CPU.

    XLA makes a kernel of every few operations, and compiles each for about 10 ms. The engine of
    `default` adds 0.4 s to the compilation of a step then, and 0.2 s as one kernel; `pretraining`
    1.2 s and 0.5 s (Intel; a step of adamw with a fixed clip takes 0.2 s). XLA has no public way to
    ask for one function. It compiles short loops of its own so, and marks them by these attributes
    of the call. An XLA that does not know them compiles the function as any other.

    Args:
        function: a pure function, within `jit`.
        args: its arguments.
    """
    if not is_one_kernel():
        return function(*args)

    def with_inlined_calls(*args: PyTree) -> Result:  # of `jnp.where`
        with set_xla_metadata(inlineable="true", xla_cpu_small_call="false"):
            return function(*args)

    with set_xla_metadata(inlineable="false", xla_cpu_small_call="true"):
        return jax.jit(with_inlined_calls)(*args)


def is_one_kernel() -> bool:
    """Whether `in_one_kernel` makes one kernel.

    On other platforms, and with several devices, among which XLA would have to divide the call, the
    operations are inlined.
    """
    return jax.default_backend() == "cpu" and jax.device_count() == 1


@partial(jax.jit, static_argnums=(0, 1, 2))
def _call(
    function: Callable[..., Result], structure: Any, constants: tuple[Any, ...], arrays: list[Any]
) -> Result:
    """Calls the function with its arguments, which `in_one_call` has taken apart."""
    remaining = iter(arrays)
    leaves = [next(remaining) if each is _ARRAY else each for each in constants]
    return function(*structure.unflatten(leaves))


# -- the array namespace of the core ---------------------------------------------------------------


class JaxNamespace(ArrayNamespace):
    """The functions of the core for JAX. `JAX` is the instance."""

    def where(self, condition: Flag, x: Array | Number, y: Array | Number, /) -> Array:
        """A selection. `jnp.where` is a call, which XLA has to inline, and converts numbers."""
        dtype = jnp.result_type(x, y)
        shape = jnp.broadcast_shapes(*map(jnp.shape, (condition, x, y)))
        x, y = (_broadcast(each, dtype, shape) for each in (x, y))
        return lax.select(_broadcast(condition, np.bool_, shape), x, y)

    def flag(self, condition: Flag, flags: int, /) -> Int:
        """A selection, which is one operation instead of two."""
        return self.where(condition, np.int32(flags), np.int32(0))

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


def _broadcast(x: Array | Number, dtype: Any, shape: tuple[int, ...]) -> Array:
    """An array of this dtype and shape. A number stays a constant of the program."""
    if not isinstance(x, jax.Array):
        return np.broadcast_to(np.asarray(x, dtype), shape)
    return jnp.broadcast_to(x.astype(dtype), shape)


JAX = JaxNamespace(jnp)
"""The namespace of JAX arrays."""

register(jax.Array, lambda array: JAX)
