"""Converts JAX arrays and random keys to and from JSON, for `healcore.runtime.json_codec`."""

from __future__ import annotations

import base64
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def node_of(value: Any) -> dict[str, Any] | None:
    """Converts an array or a random key to JSON; returns None for any other value."""
    if not isinstance(value, jax.Array) or not value.is_fully_addressable:
        return None
    extra = {}
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        extra = {"impl": str(jax.random.key_impl(value))}
        value = jax.random.key_data(value)
    data = np.ascontiguousarray(value)
    return {
        "dtype": data.dtype.name,
        "shape": list(data.shape),
        "bytes": base64.b64encode(data.tobytes()).decode(),
        **extra,
    }


def value_of(content: dict[str, Any]) -> jax.Array:
    """Converts JSON from `node_of` to an array or key. Raises an exception for other JSON."""
    data = base64.b64decode(content["bytes"])
    array = np.frombuffer(data, np.dtype(content["dtype"])).reshape(content["shape"])
    found = jnp.asarray(array)
    return jax.random.wrap_key_data(found, impl=content["impl"]) if "impl" in content else found
