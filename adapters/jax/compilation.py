"""Compiles healcore's functions as one call outside of `jit`.

Outside of `jit`, JAX dispatches each of the engine's operations separately, which takes about 20
times as long as one call (`default`, 2 CPU cores).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
from jax.core import Tracer

P = ParamSpec("P")
Result = TypeVar("Result")


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
