"""Converts JAX arrays and random keys to and from JSON, for `healcore.runtime.store.values`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from healcore.runtime.store import values


def node_of(value: Any) -> dict[str, Any] | None:
    """Converts an array or a random key to JSON; returns None for any other value."""
    if not isinstance(value, jax.Array) or not value.is_fully_addressable:
        return None
    if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return values.pack_array(np.asarray(value))
    key = values.pack_array(np.asarray(jax.random.key_data(value))) or {}
    return {**key, "impl": str(jax.random.key_impl(value))}


def value_of(content: dict[str, Any]) -> jax.Array:
    """Converts JSON from `node_of` to an array or key. Raises an exception for other JSON."""
    found = jnp.asarray(values.unpack_array(content))
    return jax.random.wrap_key_data(found, impl=content["impl"]) if "impl" in content else found
