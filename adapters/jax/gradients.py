"""Computes norms of gradients or updates in float32, and scales or replaces their leaves.

optax computes norms in the dtype of the leaves. In float16, squares of 256 and more overflow;
bfloat16 has an error of 0.3 %. The functions here keep the leaves' dtypes, and do not change
integer and float0 leaves. `find_unread` finds gradients that an optimizer does not read, for
instance of parameters frozen by optax.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.interpreters.partial_eval import dce_jaxpr

P = ParamSpec("P")
Result = TypeVar("Result")
Tree = TypeVar("Tree")


def compiled(function: Callable[P, Result], *, static: tuple[int, ...] = ()) -> Callable[P, Result]:
    """Compiles a function as one call; inside `jit` its operations are inlined.

    Outside of `jit`, JAX would dispatch each operation separately, which takes about 20 times as
    long. The function runs under the standard promotion of dtypes, because under the user's
    ``jax_numpy_dtype_promotion="strict"`` a sum of a bool and an int32 raises. `static` has the
    positions of arguments that are hashable values instead of pytrees.
    """
    jitted = jax.jit(function, static_argnums=static, inline=True)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        with jax.numpy_dtype_promotion("standard"):
            return jitted(*args, **kwargs)

    return call


def is_gradient(leaf: Any) -> bool:
    """Whether the dtype of a leaf is floating or complex."""
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def gradient_leaves(tree: Any) -> list[jax.Array]:
    """The floating and complex leaves of a tree, in flattening order."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_gradient(leaf)]


def both_norms(tree: Any) -> tuple[jax.Array, jax.Array]:
    """L2 norm over all gradients, and of each gradient leaf in flattening order.

    Args:
        tree: gradients of any floating or complex dtype; may be empty.

    Returns:
        float32, 0-d and (n,). The global norm is 0 for an empty tree, and NaN or Inf if any element
        is. Finite gradients above 1.8e19 overflow float32 when squared, so their norm is Inf.
    """
    return _norms([jnp.asarray(leaf) for leaf in gradient_leaves(tree)])


@compiled
def _norms(leaves: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    sums = [_square_sum(leaf) for leaf in leaves]
    each = jnp.stack(sums) if sums else jnp.zeros((0,), jnp.float32)
    return jnp.sqrt(sum(sums, start=jnp.zeros((), jnp.float32))), jnp.sqrt(each)


def _of_gradients(
    function: Callable[Concatenate[list[jax.Array], P], list[jax.Array]],
) -> Callable[Concatenate[Tree, P], Tree]:
    """Turns a function of a list of gradients into a function of a tree, compiled as one call."""
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
def scale(leaves: list[jax.Array], factor: jax.typing.ArrayLike) -> list[jax.Array]:
    """Multiplies every leaf by one factor, float32 0-d.

    Computes in at least float32: a factor in bfloat16 would have an error of up to 0.4 %.
    """
    return [_product(leaf, factor) for leaf in leaves]


@_of_gradients
def scale_each(leaves: list[jax.Array], factors: jax.Array) -> list[jax.Array]:
    """Multiplies leaf i by `factors[i]`; float32 (n,) in the order of `both_norms`."""
    factors = jnp.asarray(factors)
    return [_product(leaf, factor) for leaf, factor in zip(leaves, factors, strict=True)]


@_of_gradients
def fill_where(leaves: list[jax.Array], skip: jax.Array, value: float) -> list[jax.Array]:
    """Replaces every element by `value` where `skip` (bool, 0-d).

    An update of -0.0 keeps every parameter bit-identical: ``p + -0.0`` is p for every p, but
    ``-0.0 + 0.0`` is ``+0.0``. (XLA's bfloat16 addition flushes subnormals, |p| < 1.2e-38, in some
    programs; `commit` keeps subnormals.) XLA fuses this into the addition, at no cost.
    """

    def filled(leaf: jax.Array) -> jax.Array:
        is_complex = jnp.issubdtype(leaf.dtype, jnp.complexfloating)
        number = jax.lax.complex(value, value) if is_complex else value
        return jnp.where(skip, jnp.asarray(number, leaf.dtype), leaf)

    return [filled(leaf) for leaf in leaves]


def _square_sum(leaf: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(leaf):
        return _square_sum(jnp.real(leaf)) + _square_sum(jnp.imag(leaf))
    # XLA splits a plain reduction over the cores. A reshape to (rows, 1024) and two sums is 12
    # times slower, because the reshape copies (25 M float32 on 2 cores: 38 ms against 3.4 ms).
    return jnp.sum(jnp.square(jnp.asarray(leaf).astype(jnp.float32)))


def _product(leaf: jax.Array, factor: jax.typing.ArrayLike) -> jax.Array:
    if jnp.iscomplexobj(leaf):  # in a complex product, -0.0 becomes 0.0
        return jax.lax.complex(_product(jnp.real(leaf), factor), _product(jnp.imag(leaf), factor))
    # A product instead of a division by the norm, as in optax.clip_by_global_norm: XLA fuses a
    # product into every consumer of the gradient, but writes a quotient to memory (25 M float32
    # with adamw on 2 cores: 19 ms a step and no temporary, against 45 ms and 100 MB).
    wide = jnp.promote_types(leaf.dtype, jnp.float32)
    return (jnp.asarray(factor, jnp.float32) * leaf.astype(wide)).astype(leaf.dtype)


# -- gradients that an optimizer does not read ---------------------------------------------------


def find_unread(
    known: dict[Any, list[bool]], step: Callable[..., tuple[Any, Any]], *args: Any
) -> list[bool]:
    """Whether each leaf of the gradients influences no update of this or any later step.

    `step` is a pure function ``(gradients, state, params) -> (updates, state)`` of `args`, and is
    traced. A step that cannot be traced reads every gradient. `known` holds the results of eager
    calls by the structure of the gradients.
    """
    structure, eager = jax.tree.structure(args[0]), not is_traced(args)
    if eager and structure in known:
        return known[structure]
    count = structure.num_leaves
    read = [True] * count
    try:
        closed, outputs = jax.make_jaxpr(step, return_shape=True)(*args)
    except Exception:  # concrete values are needed, or the step raises when it is run too
        pass
    else:
        updates, kept = (len(jax.tree.leaves(each)) for each in outputs)
        read_state, before = [False] * kept, None
        while read_state != before:
            read = dce_jaxpr(closed.jaxpr, [True] * updates + read_state)[1]
            # A state leaf that this step reads has to be right at the end of the last step.
            before, read_state = read_state, read[count : count + kept]
    unread = [not each for each in read[:count]]
    if eager:
        known[structure] = unread
    return unread


def is_traced(tree: Any) -> bool:
    """Whether a tree contains a tracer."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def without(tree: Tree, unread: Sequence[bool]) -> Tree:
    """Replaces gradients that are `unread` by empty arrays, whose norm is 0."""
    return _changed(tree, unread, lambda leaf: jnp.zeros((0,), jnp.float32))


def finite(tree: Tree, unread: Sequence[bool]) -> Tree:
    """Replaces NaN and Inf of gradients that are `unread` by 0: their moments stay finite."""
    return _changed(tree, unread, lambda leaf: jnp.where(jnp.isfinite(leaf), leaf, 0))


def _changed(tree: Tree, unread: Sequence[bool], change: Callable[[Any], jax.Array]) -> Tree:
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(
        change(leaf) if unused and is_gradient(leaf) else leaf
        for leaf, unused in zip(leaves, unread, strict=True)
    )
