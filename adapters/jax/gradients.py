"""Trees of gradients or updates: their norms in float32, and functions that scale or replace them.

optax computes norms in the dtype of the leaves: float16 squares overflow from 256 on, bfloat16
loses 0.3 %. The functions here keep leaves' dtypes, and do not change integer and float0 leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import chex
import jax
import jax.numpy as jnp

from healcore.jax.compilation import compiled
from healcore.jax.namespace import shared

SMALL = 1 << 14
"""Elements of the largest tensor that `not_finite` checks."""
P = ParamSpec("P")
Tree = TypeVar("Tree")


def is_gradient(leaf: Any) -> bool:
    """Whether a leaf is a gradient: floating or complex."""
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def gradient_leaves(tree: Any) -> list[chex.Array]:
    """The gradients of a tree in flattening order; None and MaskedNode have none."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_gradient(leaf)]


def global_norm(tree: chex.ArrayTree) -> chex.Array:
    """L2 norm over all leaves.

    Args:
        tree: gradients of any floating or complex dtype; may be empty.

    Returns:
        float32, 0-d; 0 for an empty tree; NaN or Inf as soon as one element is. Finite gradients
        above 1.8e19 overflow float32 when squared and count as infinite.
    """
    return both_norms(tree)[0]


def leaf_norms(tree: chex.ArrayTree) -> chex.Array:
    """L2 norm of each gradient leaf, in flattening order.

    Returns:
        float32 (n,), n = number of floating or complex leaves.
    """
    return both_norms(tree)[1]


def both_norms(tree: Any) -> tuple[chex.Array, chex.Array]:
    """`global_norm` and `leaf_norms` from one pass over the gradients."""
    return _norms([jnp.asarray(leaf) for leaf in gradient_leaves(tree)])


@compiled
def _norms(leaves: list[chex.Array]) -> tuple[chex.Array, chex.Array]:
    sums = [_square_sum(leaf) for leaf in leaves]
    each = jnp.stack(sums) if sums else jnp.zeros((0,), jnp.float32)
    return jnp.sqrt(sum(sums, start=jnp.zeros((), jnp.float32))), jnp.sqrt(each)


def _of_gradients(
    function: Callable[Concatenate[list[chex.Array], P], list[chex.Array]],
) -> Callable[Concatenate[Tree, P], Tree]:
    """Makes a function of a list of gradients a function of a tree, compiled as one call."""
    call = compiled(function)

    @functools.wraps(function)
    def changed(tree: Tree, *args: P.args, **kwargs: P.kwargs) -> Tree:
        leaves, structure = jax.tree.flatten(tree)
        places = [i for i, leaf in enumerate(leaves) if is_gradient(leaf)]
        new = call([jnp.asarray(leaves[i]) for i in places], *args, **kwargs)
        for i, leaf in zip(places, new, strict=True):
            leaves[i] = leaf
        return structure.unflatten(leaves)

    return changed


@_of_gradients
def scale(leaves: list[chex.Array], factor: chex.Numeric) -> list[chex.Array]:
    """Multiplies every leaf by one factor, float32 0-d.

    In at least float32, rounded once: a factor in bfloat16 would be off by up to 0.4 %.
    """
    return [_product(leaf, factor) for leaf in leaves]


@_of_gradients
def scale_each(leaves: list[chex.Array], factors: chex.Array) -> list[chex.Array]:
    """Multiplies leaf i by `factors[i]`; float32 (n,) in the order of `leaf_norms`."""
    factors = jnp.asarray(factors)
    return [_product(leaf, factor) for leaf, factor in zip(leaves, factors, strict=True)]


@_of_gradients
def fill_where(leaves: list[chex.Array], skip: chex.Array, value: float) -> list[chex.Array]:
    """`value` in every element where `skip` (bool, 0-d); NaN is for `optax.apply_if_finite`."""
    return [jnp.where(skip, jnp.full((), value, leaf.dtype), leaf) for leaf in leaves]


@_of_gradients
def no_update_where(leaves: list[chex.Array], skip: chex.Array) -> list[chex.Array]:
    """Updates that leave parameters bit-identical where `skip` (bool, 0-d).

    They are -0.0 because ``p + -0.0`` is p for every p, but ``-0.0 + 0.0`` is ``+0.0``. (XLA's own
    bfloat16 addition flushes subnormals, |p| < 1.2e-38, in some programs; `commit` keeps them.)
    Non-finite elements always become -0.0: fused into the addition this costs nothing.
    """
    return [
        jnp.where(skip | ~jnp.isfinite(leaf), _negative_zero(leaf.dtype), leaf) for leaf in leaves
    ]


def not_finite(tree: Any) -> chex.Array:
    """Whether a NaN or Inf is in a leaf of up to `SMALL` elements; bool, 0-d.

    A learning rate of NaN, or a bias correction of 0, shows in those too. Checking all leaves, or a
    strided part of each, took four times as long as an adamw step (25 M float32, 24 leaves, 2 CPU
    cores: 280 against 69 ms, and 96 MB), because XLA writes the update to memory for it.
    """
    return _any_not_finite([leaf for leaf in gradient_leaves(tree) if jnp.size(leaf) <= SMALL])


@compiled
def _any_not_finite(leaves: list[chex.Array]) -> chex.Array:
    flags = [~jnp.isfinite(leaf).all() for leaf in leaves]
    if not flags:
        return jnp.zeros((), jnp.bool_)
    # `shared`: else each tensor's kernel repeats it (192 tensors: 67,000 instructions, not 31,000).
    return shared(jnp.stack(flags).any())


def _square_sum(leaf: chex.Array) -> chex.Array:
    if jnp.iscomplexobj(leaf):
        return _square_sum(jnp.real(leaf)) + _square_sum(jnp.imag(leaf))
    # XLA splits a plain reduction over the cores. A reshape to (rows, 1024) and two sums was 12
    # times slower (25 M float32 on 2 cores: 3.4 against 38 ms, the reshape copies); vdot and a sum
    # over the last axis first were as fast.
    return jnp.sum(jnp.square(jnp.asarray(leaf).astype(jnp.float32)))


def _product(leaf: chex.Array, factor: chex.Numeric) -> chex.Array:
    # Not divided by the norm, as in optax.clip_by_global_norm: XLA copies a product into every
    # consumer of the gradient, but writes a quotient to memory first (25 M float32 with adamw on 2
    # cores: 19 ms a step and no temporary, against 45 ms and 100 MB).
    wide = jnp.promote_types(leaf.dtype, jnp.float32)
    return (leaf.astype(wide) * jnp.asarray(factor, jnp.float32)).astype(leaf.dtype)


def _negative_zero(dtype: Any) -> chex.Array:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.asarray(complex(-0.0, -0.0), dtype)
    return jnp.asarray(-0.0, dtype)
