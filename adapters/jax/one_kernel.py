"""Compiles a chain of operations on single numbers as one kernel of a CPU.

XLA is made for large arrays: it divides a program into kernels, each of which is a loop over
elements. The engine is 200 operations on single numbers, whose results are read by many others. XLA
divides it into dozens of kernels, each of which computes again what it reads of the others:

    as a part of the step                           as one kernel
    [kernel 1: bad, z]                              [one function: bad, z, skip, factor, counts]
    [kernel 2: bad, z again, skip]
    [kernel 3: bad, z, skip again, factor]

XLA has no public way to ask for one function. But it compiles short loops of its own as a call of
one function, and marks them by attributes of the call, which any call may have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
from jax.experimental.xla_metadata import set_xla_metadata

P = ParamSpec("P")
Result = TypeVar("Result")

_ONE_KERNEL = {"inlineable": "false", "xla_cpu_small_call": "true"}
"""XLA marks a short loop of its own by the second attribute, and compiles it as one function. The
first attribute keeps the call until then."""


def one_kernel(
    function: Callable[P, Result], *, static: tuple[int, ...] = ()
) -> Callable[P, Result]:
    """Compiles a function of numbers and short vectors as one kernel on a CPU.

    XLA makes a kernel of every few operations, compiles each for about 15 ms, and computes cheap
    operations again in each kernel that reads them. The engine of `default` is 48 kernels then. As
    one kernel it compiles in a fifth of the time (150 ms instead of 740), and computes each number
    once. An XLA that does not know the attributes compiles the function as any other.

    On other platforms, and with several devices, among which XLA would have to divide the call, the
    operations are inlined.

    Args:
        function: a pure function of JAX arrays.
        static: positions of the arguments that are hashable values instead of arrays.

    Returns:
        A function with the same arguments and results, to be called while a step is traced.
    """
    inlined = jax.jit(function, static_argnums=static, inline=True)
    call = jax.jit(function, static_argnums=static)

    @functools.wraps(function)
    def one(*args: P.args, **kwargs: P.kwargs) -> Result:
        if not is_one_kernel():
            return inlined(*args, **kwargs)
        with set_xla_metadata(**_ONE_KERNEL):
            return call(*args, **kwargs)

    return one


def is_one_kernel() -> bool:
    """Whether functions of `one_kernel` are compiled as one kernel: the only device is a CPU.

    Otherwise the caller has to protect values that many operations read, see
    `healcore.jax.array_namespace.JaxNamespace.shared`.
    """
    return jax.default_backend() == "cpu" and jax.device_count() == 1
