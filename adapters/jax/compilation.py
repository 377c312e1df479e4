"""Calls functions of pytrees as one compiled call, or on a CPU as one kernel.

The arrays among the arguments are traced. Every other leaf is a constant of the compiled function:
a number of the policy, a function, a text.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
from jax.core import Tracer
from jax.experimental.xla_metadata import set_xla_metadata

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
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args)):
            return function(*args)
        return _call(function, *_split(args))


def in_one_kernel(function: Callable[..., Result], *args: PyTree) -> Result:
    """Calls a function of numbers and short vectors as one kernel, where the device is a CPU.

    XLA makes a kernel of every few operations, and compiles each for about 10 ms. The engine of
    `default` adds 0.4 s to the compilation of a step then, and 0.2 s as one kernel; `pretraining`
    1.2 s and 0.5 s (Intel; a step of adamw with a fixed clip takes 0.2 s). XLA has no public way to
    ask for one function. It compiles short loops of its own so, and marks them by these attributes
    of the call. An XLA that does not know them compiles the function as any other.

    On other platforms, and with several devices, among which XLA would have to divide the call, the
    operations are inlined.

    Args:
        function: a pure function, within `jit`.
        args: its arguments.
    """
    if not compiles_one_kernel():
        return function(*args)
    with set_xla_metadata(inlineable="false", xla_cpu_small_call="true"):
        return _call(function, *_split(args))


def compiles_one_kernel() -> bool:
    """Whether `in_one_kernel` makes one kernel."""
    return jax.default_backend() == "cpu" and jax.device_count() == 1


def _split(args: PyTree) -> tuple[Any, tuple[Any, ...], list[Any]]:
    """The arguments of `_call` after the function: structure, constants and arrays."""
    leaves, structure = jax.tree.flatten(args)
    constants = tuple(_ARRAY if is_array(leaf) else leaf for leaf in leaves)
    return structure, constants, [leaf for leaf in leaves if is_array(leaf)]


@partial(jax.jit, static_argnums=(0, 1, 2))
def _call(
    function: Callable[..., Result], structure: Any, constants: tuple[Any, ...], arrays: list[Any]
) -> Result:
    """Calls the function with the arguments that `_split` has taken apart."""
    remaining = iter(arrays)
    leaves = [next(remaining) if each is _ARRAY else each for each in constants]
    return function(*structure.unflatten(leaves))
