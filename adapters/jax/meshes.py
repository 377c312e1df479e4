"""Puts a fresh state on the mesh of the parameters, so that a step is compiled only once.

`jnp.zeros(())` is on no mesh, and a compiled step returns it on the mesh of the parameters: another
type for `jax.jit`, which would trace and compile the step a second time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec


def on_mesh_of(params: Any, state: Any) -> Any:
    """The state, with arrays that are on no mesh replicated over the mesh of the parameters.

    Args:
        params: a tree of arrays, traced or not; without a mesh the state is returned as it is.
        state: fresh from `init`. What is moved is copied: scalars and short vectors.
    """
    shardings = (each.sharding for each in jax.tree.leaves(params) if _is_array(each))
    sharding = next((each for each in shardings if isinstance(each, NamedSharding)), None)
    if sharding is None:
        return state
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())

    def one(leaf: Any) -> Any:
        if not _is_array(leaf) or leaf.committed or isinstance(leaf.sharding, NamedSharding):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = one(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        # Not device_put: among several processes that compares the values, which is a collective.
        value = np.asarray(leaf)
        return jax.make_array_from_callback(value.shape, everywhere, lambda index: value[index])

    return jax.tree.map(one, state)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
