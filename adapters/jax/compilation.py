"""Compiles healcore's functions as one call outside of `jit`, and as one kernel on a CPU.

Outside of `jit`, JAX dispatches each of the engine's operations separately, which takes about 20
times as long as one call (`default`, 2 CPU cores). Inside `jit`, XLA compiles each group of fused
operations as a kernel. For the engine these are dozens of kernels, and more than half of the time
to compile a small training step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

try:
    from jax.experimental.xla_metadata import set_xla_metadata
except ImportError:  # experimental: some releases lack it
    set_xla_metadata = None

P = ParamSpec("P")
Result = TypeVar("Result")

_HINT = {"inlineable": "false", "xla_cpu_small_call": "true"}
"""Tells XLA to compile a call as one kernel. Releases of XLA that lack these names ignore them."""


def compiled(function: Callable[P, Result], *, static: tuple[int, ...] = ()) -> Callable[P, Result]:
    """Compiles a function as one call. Inside a transformation, calls the function itself.

    The function itself also runs for arrays on different devices, for which JAX cannot compile one
    call. Transformations are `jit`, `vmap`, `shard_map`, `grad` and others with traced arguments.

    Args:
        function: a pure function of pytrees of arrays.
        static: positions of arguments that are hashable values instead of pytrees.
    """
    jitted = jax.jit(function, static_argnums=static)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        arrays = [each for each in jax.tree.leaves((args, kwargs)) if isinstance(each, jax.Array)]
        if any(isinstance(each, Tracer) for each in arrays):
            return function(*args, **kwargs)
        places = {frozenset(each.devices()) for each in arrays if each.committed}
        return (jitted if len(places) < 2 else function)(*args, **kwargs)

    return call


def one_kernel(function: Callable[..., Result], *args: Any) -> Result:
    """Calls ``function(*args)``. Inside `jit` on a CPU, compiles the call as one kernel.

    Args:
        function: a pure function of elementwise operations, slices, concatenations and reductions,
            because XLA cannot compile a scatter in such a kernel. The first array of its result
            must not be one of `args`.
        args: pytrees of arrays, at least one array (XLA crashes on a kernel without arguments).
    """
    # Outside of jit (for example under `vmap` alone) a call would be compiled at every step.
    hint = set_xla_metadata
    if hint is None or not isinstance(jnp.zeros(()), Tracer):
        return function(*args)
    call = jax.jit(function)  # traced once for both branches

    def marked(*args: Any) -> Result:
        (first, *others), structure = jax.tree.flatten(call(*args))
        found: Any = hint(first, **_HINT)  # annotates the call that computed `first`
        if not isinstance(found, jax.Array):  # older releases of JAX have no hints on values
            found = first
        return jax.tree.unflatten(structure, [found, *others])

    return lax.platform_dependent(*args, cpu=marked, default=call)


def one_kernel_per_call() -> contextlib.AbstractContextManager[Any]:
    """Compiles each call that is traced in this context as one kernel, if JAX supports it."""
    return contextlib.nullcontext() if set_xla_metadata is None else set_xla_metadata(**_HINT)
