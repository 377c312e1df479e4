"""Measures, scales and replaces the gradients or updates in a tree.

optax computes norms in the dtype of the leaves. In float16, squares of 256 and more overflow;
bfloat16 has an error of 0.3 %. The functions here compute norms in float32, keep the leaves'
dtypes, and do not change integer and float0 leaves.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from healcore.jax.trees import Leaf, PyTree, is_static

Tree = TypeVar("Tree")


def is_gradient(leaf: Leaf) -> bool:
    """Whether a leaf is of a floating or complex dtype, as each gradient is.

    False for an integer, and for a function or a text, which an Equinox module has among its
    leaves. An integer parameter has a gradient of dtype float0, which has no norm.

    Args:
        leaf: an array, traced or not, a number or any object.
    """
    return not is_static(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def gradient_leaves(tree: PyTree) -> list[jax.Array]:
    """The floating and complex leaves of a tree, in flattening order.

    `HealState.heal_leaf_norms` and all factors per tensor are in this order.

    Args:
        tree: gradients, parameters or any other tree.
    """
    return [leaf for leaf in jax.tree.leaves(tree) if is_gradient(leaf)]


def both_norms(tree: PyTree) -> tuple[jax.Array, jax.Array]:
    """L2 norm over all gradients, and of each gradient leaf in flattening order.

    Args:
        tree: gradients of any floating or complex dtype; may be empty.

    Returns:
        float32, 0-d and (n,). The global norm is 0 for an empty tree, and NaN or Inf if any element
        is. Finite gradients above 1.8e19 overflow float32 when squared, so their norm is Inf.
    """
    sums = [_square_sum(leaf) for leaf in gradient_leaves(tree)]
    if not sums:
        return jnp.zeros((), jnp.float32), jnp.zeros((0,), jnp.float32)
    return jnp.sqrt(functools.reduce(operator.add, sums)), jnp.sqrt(jnp.stack(sums))


def scale(tree: Tree, factor: jax.typing.ArrayLike) -> Tree:
    """Multiplies every gradient of a tree by one factor.

    Computes in at least float32: a factor in bfloat16 would have an error of up to 0.4 %.

    Args:
        tree: the gradients.
        factor: float32 0-d, such as a factor of a clip or a multiplier of the learning rate.
    """
    return _changed(tree, lambda leaf: _product(leaf, factor))


def scale_to_limit(tree: Tree, factor: jax.Array) -> Tree:
    """Works as `scale` by a factor of at most 1. Returns the leaves themselves if it is 1.

    LLVM contracts a product into a sum that reads it, so after `scale` a momentum, ``0.9 * trace +
    g * 1``, may round another product than ``0.9 * trace + g`` does. It does not contract the
    result of a selection.

    Args:
        tree: the gradients.
        factor: float32 0-d, at most 1.
    """
    return _changed(tree, lambda leaf: jnp.where(factor < 1, _product(leaf, factor), leaf))


def scale_each(tree: Tree, factors: jax.Array) -> Tree:
    """Multiplies each gradient of a tree by a factor of its own.

    Args:
        tree: the n gradients.
        factors: float32 (n,), in the order of `both_norms`.
    """
    remaining = iter(factors)
    return _changed(tree, lambda leaf: _product(leaf, next(remaining)))


def clip_as_optax(tree: Tree, max_norm: Any, factor: jax.Array, uses_factor: jax.Array) -> Tree:
    """Clips gradients with the bits of `optax.clip_by_global_norm(max_norm)`.

    optax divides by the norm and then multiplies by the limit, which differs in the last bits from
    a product with one factor.

    Args:
        tree: the gradients.
        max_norm: the limit.
        factor: the engine's factor, float32 0-d. Used in place of optax's clip where `uses_factor`,
            and where optax's norm of float16 gradients overflows: optax would clip these to 0.
        uses_factor: whether a rollback has set a lower limit, bool 0-d.
    """
    gradients = gradient_leaves(tree)
    if not gradients:
        return tree
    clipped: Any
    clipped, _ = optax.clip_by_global_norm(max_norm).update(gradients, optax.EmptyState())
    uses_factor |= ~jnp.isfinite(optax.tree.norm(gradients))
    remaining = iter(clipped)
    return _changed(
        tree, lambda leaf: jnp.where(uses_factor, _product(leaf, factor), next(remaining))
    )


def fill_where(tree: Tree, condition: jax.typing.ArrayLike, value: float) -> Tree:
    """Replaces every element by `value` where the condition holds.

    An update of -0.0 keeps every parameter bit-identical: ``p + -0.0`` is p for every p, but
    ``-0.0 + 0.0`` is ``+0.0``. (XLA's bfloat16 addition flushes subnormals, |p| < 1.2e-38, in some
    programs; `commit` keeps subnormals.) XLA fuses this into the addition, at no cost.

    Args:
        tree: gradients or updates.
        condition: bool 0-d, such as the skip.
        value: 0.0 for gradients that an optimizer reads, -0.0 for updates.
    """
    return _changed(tree, lambda leaf: _filled(leaf, condition, value))


def fill_nonfinite(tree: Tree) -> Tree:
    """Replaces every NaN and Inf of some updates by -0.0, which keeps these parameters.

    Only for an optimizer that may make them. The test is a second use of the update, so LLVM
    contracts no product of the optimizer into the sum of the parameter. SGD would end with other
    last bits than without `protect`.

    Args:
        tree: the updates.
    """
    return _changed(tree, lambda leaf: _filled(leaf, ~jnp.isfinite(leaf), -0.0))


def _filled(leaf: jax.Array, condition: jax.typing.ArrayLike, value: float) -> jax.Array:
    """A leaf with `value` where the condition holds."""
    both: Any = value
    if jnp.iscomplexobj(leaf):
        both = jax.lax.complex(value, value)
    return jnp.where(condition, jnp.full_like(leaf, both), leaf)


def _changed(tree: Tree, change: Callable[[jax.Array], jax.Array]) -> Tree:
    """Changes each gradient of a tree, in flattening order. All other leaves stay."""

    def changed(leaf: Leaf) -> Leaf:
        if is_gradient(leaf):
            return change(jnp.asarray(leaf))
        return leaf

    return jax.tree.map(changed, tree)


def _square_sum(leaf: jax.Array) -> jax.Array:
    """Sum of the squares of all elements, float32 0-d."""
    if jnp.iscomplexobj(leaf):
        return _square_sum(jnp.real(leaf)) + _square_sum(jnp.imag(leaf))
    # XLA splits a plain reduction over the cores. A reshape to (rows, 1024) and two sums is 12
    # times slower, because the reshape copies (25 M float32 on 2 cores: 38 ms against 3.4 ms).
    return jnp.sum(jnp.square(jnp.asarray(leaf).astype(jnp.float32)))


def _product(leaf: jax.Array, factor: jax.typing.ArrayLike) -> jax.Array:
    """A leaf times a factor, computed in at least float32, in the dtype of the leaf."""
    if jnp.iscomplexobj(leaf):  # in a complex product, -0.0 becomes 0.0
        return jax.lax.complex(_product(jnp.real(leaf), factor), _product(jnp.imag(leaf), factor))
    # A product instead of a division by the norm, as in optax.clip_by_global_norm: XLA fuses a
    # product into every consumer of the gradient, but writes a quotient to memory (25 M float32
    # with adamw on 2 cores: 19 ms a step and no temporary, against 45 ms and 100 MB).
    wide = jnp.promote_types(leaf.dtype, jnp.float32)
    return (jnp.asarray(factor, jnp.float32) * leaf.astype(wide)).astype(leaf.dtype)
