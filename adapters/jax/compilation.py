"""Compiles healcore's functions as one call outside of `jit`.

Outside of `jit`, JAX dispatches each of the engine's operations separately, which takes about 20
times as long as one call (`default`, 2 CPU cores).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
Result = TypeVar("Result")


def standard_promotion(function: Callable[P, Result]) -> Callable[P, Result]:
    """Runs a function under the standard promotion of dtypes, whatever the user has set.

    Under ``jax_numpy_dtype_promotion="strict"`` a sum of a bool and an int32 raises.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return call


def compiled(function: Callable[P, Result], *, static: tuple[int, ...] = ()) -> Callable[P, Result]:
    """Compiles a pure function of pytrees as one call. Inside `jit` its operations are inlined.

    `static` has the positions of arguments that are hashable values instead of pytrees.
    """
    return standard_promotion(jax.jit(function, static_argnums=static, inline=True))
