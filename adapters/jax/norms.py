"""Gradient norms in float32, whatever the gradients are stored in.

optax's norm is computed in the dtype of the leaves: float16 squares overflow from 256 on, and
bfloat16 loses 0.3 %. In both cases the engine would judge a rounding error.
"""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp


def is_gradient(leaf: Any) -> bool:
    """Whether a leaf is a gradient: floating or complex. Integer and float0 leaves pass through."""
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def gradient_leaves(tree: Any) -> list[chex.Array]:
    """The gradients of a tree in flattening order; None and MaskedNode have none."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_gradient(leaf)]


def square_sums(tree: Any) -> list[chex.Array]:
    """Sum of squared magnitudes of every gradient leaf, each float32 and 0-d."""
    return [_square_sum(leaf) for leaf in gradient_leaves(tree)]


def global_norm(tree: chex.ArrayTree) -> chex.Array:
    """L2 norm over all leaves.

    Args:
        tree: gradients of any floating or complex dtype; may be empty.

    Returns:
        float32, 0-d; 0 for an empty tree; NaN or Inf as soon as one element is. Finite gradients
        above 1.8e19 overflow float32 when squared and count as infinite.
    """
    return jnp.sqrt(_total(square_sums(tree)))


def leaf_norms(tree: chex.ArrayTree) -> chex.Array:
    """L2 norm of each gradient leaf, in flattening order.

    Returns:
        float32 (n,), n = number of floating or complex leaves.
    """
    sums = square_sums(tree)
    return jnp.sqrt(jnp.stack(sums)) if sums else jnp.zeros((0,), jnp.float32)


def both_norms(tree: Any) -> tuple[chex.Array, chex.Array]:
    """`global_norm` and `leaf_norms` from one pass over the gradients."""
    sums = square_sums(tree)
    each = jnp.stack(sums) if sums else jnp.zeros((0,), jnp.float32)
    return jnp.sqrt(_total(sums)), jnp.sqrt(each)


def _square_sum(leaf: chex.Array) -> chex.Array:
    if jnp.iscomplexobj(leaf):
        return _square_sum(jnp.real(leaf)) + _square_sum(jnp.imag(leaf))
    # A plain reduction: XLA splits it over the cores by itself. A reshape to (rows, 1024) and two
    # sums was 12 times slower (25 M float32 on 2 cores: 3.4 against 38 ms, the reshape copies),
    # vdot and a sum over the last axis first were equal within the noise.
    return jnp.sum(jnp.square(jnp.asarray(leaf).astype(jnp.float32)))


def _total(sums: list[chex.Array]) -> chex.Array:
    return sum(sums, start=jnp.zeros((), jnp.float32))
