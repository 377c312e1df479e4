"""The faults of `faults`, for programs in JAX, whose edits call these two functions."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback

from benchmarks.programs.faults import RATE, Fault

fault = Fault(os.environ.get("FAULT", "none"))


def _number() -> Any:
    """Number of the current backward pass of this process."""
    return io_callback(lambda: np.int32(fault.count()), jnp.int32(0), ordered=True)


def disturbed(loss_and_grads: Any) -> Any:
    """Counts a backward pass, whose gradients are NaN in the step of the fault."""
    loss, grads = loss_and_grads
    bad = (_number() == fault.first) & (fault.kind == "nan")
    return loss, jax.tree.map(lambda each: jnp.where(bad, jnp.nan, each), grads)


def raised(optimizer: Any) -> Any:
    """The optimizer, whose updates are larger while the rate is too high."""

    def scale(updates: Any, state: Any, params: Any = None) -> Any:
        number = io_callback(lambda: np.int32(fault.passes), jnp.int32(0), ordered=True)
        first, last = fault.first, fault.first + fault.length
        high = (first <= number) & (number < last) & (fault.kind == "rate")
        return jax.tree.map(lambda each: jnp.where(high, RATE * each, each), updates), state

    return optax.chain(optimizer, optax.GradientTransformation(lambda params: (), scale))


def digest(weights: Any) -> str:
    """Digest of the floating-point arrays of a tree."""
    found = hashlib.sha256()
    for each in jax.tree.leaves(weights):
        if jnp.issubdtype(getattr(each, "dtype", int), jnp.floating):
            found.update(np.asarray(each).tobytes())
    return found.hexdigest()[:16]
