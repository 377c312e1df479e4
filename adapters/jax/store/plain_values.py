"""Converts single JAX arrays and random keys to JSON and back.

The record of a run and the Python values of a state are JSON. An array among these values, such
as the state of a loader, is converted by `node_of`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from healcore.runtime.store import values


def node_of(value: Any) -> dict[str, Any] | None:
    """Converts an array or a random key to JSON, for values outside of the arrays of a checkpoint.

    Args:
        value: any value.

    Returns:
        A dictionary for `value_of`. None if `value` is neither an array nor a key of JAX, or if
        other processes hold a part of it.
    """
    if not isinstance(value, jax.Array) or not value.is_fully_addressable:
        return None
    if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return values.pack_array(np.asarray(value))
    key = values.pack_array(np.asarray(jax.random.key_data(value))) or {}
    return {**key, "impl": str(jax.random.key_impl(value))}


def value_of(content: dict[str, Any]) -> jax.Array:
    """Converts JSON from `node_of` to an array or a random key.

    Args:
        content: result of `node_of`. The content of a damaged checkpoint raises an exception of
            any type, which the store reports as damage.
    """
    array = jnp.asarray(values.unpack_array(content))
    if "impl" in content:
        return jax.random.wrap_key_data(array, impl=content["impl"])
    return array
