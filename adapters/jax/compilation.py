"""How healcore's own functions are compiled: as one call without `jit`, as one kernel on a CPU.

Without `jit` JAX runs each of the engine's 2,000 operations by itself: 40 ms, against 0.2 ms as one
call (2 CPU cores). Inside `jit` XLA compiles and starts each group of fused operations by itself:
the engine was 140 kernels, more than half of the CPU time of compiling a small training step.
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
except ImportError:  # experimental: another release may not have it
    set_xla_metadata = None

P = ParamSpec("P")
Result = TypeVar("Result")

_HINT = {"inlineable": "false", "xla_cpu_small_call": "true"}
"""Tells XLA to compile a call as one kernel. A release of XLA without these names ignores them."""


def compiled(function: Callable[P, Result], *, static: tuple[int, ...] = ()) -> Callable[P, Result]:
    """The function as one compiled call where no argument is traced, else the function itself.

    Nothing changes within a transformation of JAX (`jit`, `vmap`, `shard_map`, `grad`), nor for
    arrays on different devices, for which JAX cannot compile one call.

    Args:
        function: pure, of pytrees of arrays.
        static: positions of the arguments that are hashable values instead.
    """
    call = jax.jit(function, static_argnums=static)

    @functools.wraps(function)
    def either(*args: P.args, **kwargs: P.kwargs) -> Result:
        arrays = [each for each in jax.tree.leaves((args, kwargs)) if isinstance(each, jax.Array)]
        if any(isinstance(each, Tracer) for each in arrays):
            return function(*args, **kwargs)
        places = {frozenset(each.devices()) for each in arrays if each.committed}
        return (call if len(places) < 2 else function)(*args, **kwargs)

    return either


def one_kernel(function: Callable[..., Result], *args: Any) -> Result:
    """``function(*args)``; inside `jit`, in one kernel on a CPU. Elsewhere nothing changes.

    Args:
        function: pure, of elementwise operations, slices, concatenations and reductions: XLA
            cannot compile a scatter in such a kernel. The first array of the result is computed,
            not one of `args`.
        args: pytrees of arrays.
    """
    # Without jit (for example under `vmap` alone) a call would be compiled at every step.
    hint = set_xla_metadata
    if hint is None or not isinstance(jnp.zeros(()), Tracer):
        return function(*args)
    call = jax.jit(function)  # of one trace for both branches

    def marked(*args: Any) -> Result:
        (first, *others), structure = jax.tree.flatten(call(*args))
        found: Any = hint(first, **_HINT)  # on the call that made it
        if not isinstance(found, jax.Array):  # older releases of JAX have no hints on values
            found = first
        return jax.tree.unflatten(structure, [found, *others])

    return lax.platform_dependent(*args, cpu=marked, default=call)


def one_kernel_per_call() -> contextlib.AbstractContextManager[Any]:
    """Compiles each call that is traced in this context as one kernel, where JAX supports it."""
    return contextlib.nullcontext() if set_xla_metadata is None else set_xla_metadata(**_HINT)
