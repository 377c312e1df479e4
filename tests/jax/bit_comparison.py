"""Comparing pytrees bit for bit: -0.0 is not 0.0 here, and a NaN equals itself."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def bits(tree: Any) -> list[tuple[str, str, bytes]]:
    """Path, type and bytes of every leaf."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        found.append((jax.tree_util.keystr(path), f"{array.dtype}{array.shape}", array.tobytes()))
    return found


def assert_same_bits(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    different = [x[:2] for x, y in zip(bits(a), bits(b), strict=True) if x != y]
    assert not different, f"leaves differ: {different}"


def avals(tree: Any) -> list[Any]:
    """Shape, dtype and weak type of every array: a compiled step depends on them."""
    return [(leaf.shape, leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(tree)]
