"""Compiles a function of many small operations as one kernel, where XLA compiles for a CPU.

XLA compiles and starts each group of operations that it has fused by itself: the engine was 140
kernels, and more than half of the CPU time of compiling a small training step. XLA can also
compile a whole call as one kernel, and does so for small loops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

try:
    from jax.experimental.xla_metadata import set_xla_metadata
except ImportError:  # experimental: another release may not have it
    set_xla_metadata = None

Result = TypeVar("Result")

_HINT = {"inlineable": "false", "xla_cpu_small_call": "true"}
"""Read by XLA: keep this call, and compile it as one kernel. A release without them ignores it."""


def one_kernel(function: Callable[..., Result], *args: Any) -> Result:
    """``function(*args)``; inside `jit`, in one kernel on a CPU. Elsewhere nothing changes.

    Args:
        function: pure, of elementwise operations, slices, concatenations and reductions: XLA
            refuses a kernel with a scatter, say. The first array of its result is computed, not one
            of `args`.
        args: pytrees of arrays.
    """
    # Without jit (under `vmap` alone, say) a call would be compiled at every step.
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
