"""Measures, scales and replaces gradients or updates, the arrays of a tree that are floating.

optax computes norms in the dtype of the leaves. In float16, squares of 256 and more overflow;
bfloat16 has an error of 0.3 %. The functions here compute norms in float32, keep the leaves'
dtypes, and do not change integer and float0 leaves. `find_unread` finds gradients that an optimizer
does not read, for instance of parameters frozen by optax.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.interpreters.partial_eval import dce_jaxpr

from healcore.jax.trees import Leaf, PyTree, is_static

P = ParamSpec("P")
Result = TypeVar("Result")
Tree = TypeVar("Tree")


def compiled(function: Callable[P, Result], *, static: tuple[int, ...] = ()) -> Callable[P, Result]:
    """Compiles a function as one call; inside `jit` its operations are inlined.

    Outside of `jit`, JAX would dispatch each operation separately, which takes about 20 times as
    long. The function runs under the standard promotion of dtypes, because under the user's
    ``jax_numpy_dtype_promotion="strict"`` a sum of a bool and an int32 raises.

    Args:
        function: a pure function of pytrees of arrays.
        static: positions of the arguments that are hashable values instead of pytrees.

    Returns:
        A function with the same arguments and results, for eager and for traced arrays.
    """
    jitted = jax.jit(function, static_argnums=static, inline=True)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        with jax.numpy_dtype_promotion("standard"):
            return jitted(*args, **kwargs)

    return call


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


@compiled
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


def _of_gradients(
    function: Callable[Concatenate[list[jax.Array], P], list[jax.Array]],
) -> Callable[Concatenate[Tree, P], Tree]:
    """Turns a function of a list of gradients into a function of a tree, compiled as one call."""
    call = compiled(function)

    @functools.wraps(function)
    def changed(tree: Tree, *args: P.args, **kwargs: P.kwargs) -> Tree:
        leaves, structure = jax.tree.flatten(tree)
        places = []
        gradients = []
        for i, leaf in enumerate(leaves):
            if is_gradient(leaf):
                places.append(i)
                gradients.append(jnp.asarray(leaf))
        new = call(gradients, *args, **kwargs)
        for i, leaf in zip(places, new, strict=True):
            leaves[i] = leaf
        return structure.unflatten(leaves)

    return changed


@_of_gradients
def scale(leaves: list[jax.Array], factor: jax.typing.ArrayLike) -> list[jax.Array]:
    """Multiplies every gradient of a tree by one factor.

    Computes in at least float32: a factor in bfloat16 would have an error of up to 0.4 %.

    Args:
        leaves: the gradients. The caller passes a tree, and gets a tree.
        factor: float32 0-d, such as a factor of a clip or a multiplier of the learning rate.
    """
    return [_product(leaf, factor) for leaf in leaves]


@_of_gradients
def scale_to_limit(leaves: list[jax.Array], factor: jax.Array) -> list[jax.Array]:
    """Works as `scale` by a factor of at most 1. Returns the leaves themselves if it is 1.

    LLVM contracts a product into a sum that reads it, so after `scale` a momentum, ``0.9 * trace +
    g * 1``, may round another product than ``0.9 * trace + g`` does. It does not contract the
    result of a selection.

    Args:
        leaves: the gradients. The caller passes a tree, and gets a tree.
        factor: float32 0-d, at most 1.
    """
    is_limited = factor < 1
    return [jax.lax.select(is_limited, _product(leaf, factor), leaf) for leaf in leaves]


def clip_as_optax(
    tree: Tree, measured: PyTree, max_norm: Any, factor: jax.Array, is_limited: jax.Array | None
) -> Tree:
    """Clips gradients with the bits of `optax.clip_by_global_norm(max_norm)`.

    optax divides by the norm and then multiplies by the limit, which differs in the last bits from
    a product with one factor. The functions of optax are called as the program called them, so that
    eager and compiled steps compute what they computed.

    Args:
        tree: the gradients.
        measured: the same tree, with empty arrays for gradients that no update depends on. These
            gradients stay unchanged.
        max_norm: the limit.
        factor: the engine's factor, float32 0-d. Used in place of optax's clip where `is_limited`,
            and where optax's norm of float16 gradients overflows: optax would clip these to 0.
        is_limited: whether a rollback has set a lower limit, bool 0-d. None if the policy has no
            such limit.

    Returns:
        The clipped gradients, in their dtypes.
    """
    leaves, structure = jax.tree.flatten(tree)
    places = []
    gradients = []
    for i, (leaf, part) in enumerate(zip(leaves, jax.tree.leaves(measured), strict=True)):
        if is_gradient(leaf) and jnp.size(part) == jnp.size(leaf):
            places.append(i)
            gradients.append(jnp.asarray(leaf))
    if not gradients:
        return tree
    with jax.numpy_dtype_promotion("standard"):
        clipped: Any
        clipped, _ = optax.clip_by_global_norm(max_norm).update(gradients, optax.EmptyState())
        uses_factor = is_limited
        if any(leaf.dtype == jnp.float16 for leaf in gradients):
            overflows = ~jnp.isfinite(optax.tree.norm(gradients))
            uses_factor = overflows
            if is_limited is not None:
                uses_factor = is_limited | overflows
        if uses_factor is not None:
            clipped = _scaled_where(gradients, uses_factor, factor, clipped)
    for i, leaf in zip(places, clipped, strict=True):
        leaves[i] = leaf
    return structure.unflatten(leaves)


@_of_gradients
def scale_each(leaves: list[jax.Array], factors: jax.Array) -> list[jax.Array]:
    """Multiplies each gradient of a tree by a factor of its own.

    Args:
        leaves: the n gradients. The caller passes a tree, and gets a tree.
        factors: float32 (n,), in the order of `both_norms`.
    """
    scaled = []
    for leaf, factor in zip(leaves, jnp.asarray(factors), strict=True):
        scaled.append(_product(leaf, factor))
    return scaled


@_of_gradients
def fill_where(leaves: list[jax.Array], skip: jax.Array, value: float) -> list[jax.Array]:
    """Replaces every element by `value` on a skip.

    An update of -0.0 keeps every parameter bit-identical: ``p + -0.0`` is p for every p, but
    ``-0.0 + 0.0`` is ``+0.0``. (XLA's bfloat16 addition flushes subnormals, |p| < 1.2e-38, in some
    programs; `commit` keeps subnormals.) XLA fuses this into the addition, at no cost.

    Args:
        leaves: gradients or updates. The caller passes a tree, and gets a tree.
        skip: bool 0-d.
        value: 0.0 for gradients that an optimizer reads, -0.0 for updates.
    """
    return [jnp.where(skip, _full_like(leaf, value), leaf) for leaf in leaves]


@compiled
def _scaled_where(
    leaves: list[jax.Array], condition: jax.Array, factor: jax.Array, others: list[jax.Array]
) -> list[jax.Array]:
    """Each leaf times the factor where the condition holds, else the leaf of `others`."""
    chosen = []
    for leaf, other in zip(leaves, others, strict=True):
        chosen.append(jnp.where(condition, _product(leaf, factor), other))
    return chosen


@_of_gradients
def fill_bad(leaves: list[jax.Array], skip: jax.Array) -> list[jax.Array]:
    """Works as `fill_where` by -0.0, also where an element is NaN or Inf: its parameter stays.

    `update_check` finds before the decision most optimizers that make NaN of finite gradients. This
    function catches the other leaves, element by element. XLA fuses the test into the same
    selection.

    Args:
        leaves: updates. The caller passes a tree, and gets a tree.
        skip: bool 0-d.
    """
    taken = ~skip
    filled = []
    for leaf in leaves:
        is_used = taken & jnp.isfinite(leaf)
        filled.append(jax.lax.select(is_used, leaf, _full_like(leaf, -0.0)))
    return filled


def _full_like(leaf: jax.Array, value: jax.typing.ArrayLike) -> jax.Array:
    """An array of one value; both parts of a complex element are the value."""
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        value = jax.lax.complex(value, value)
    return jnp.full_like(leaf, value)


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


# -- gradients that an optimizer does not read ---------------------------------------------------


def find_unread(
    known: dict[Any, list[bool]], step: Callable[..., tuple[Any, Any]], *args: Any
) -> list[bool]:
    """Whether each leaf of the gradients influences no update of this or any later step.

    A frozen parameter has such a gradient. Its NaN harms nothing, so it must not skip a step. The
    step is traced to a jaxpr, and a dead-code analysis finds what its outputs depend on. A gradient
    may also enter the state and reach the updates of a later step: the state leaves that the step
    reads are outputs too, until no more are found.

    Args:
        known: results of eager calls by the structure of the gradients. Eager calls add to it.
        step: a pure function ``(gradients, state, params) -> (updates, state)``. It is traced. A
            step that cannot be traced reads every gradient.
        args: gradients, state and parameters.

    Returns:
        One bool for each leaf of the gradients.
    """
    structure = jax.tree.structure(args[0])
    eager = not is_traced(args)
    if eager and structure in known:
        return known[structure]
    count = structure.num_leaves
    read = [True] * count
    try:
        closed, outputs = jax.make_jaxpr(step, return_shape=True)(*args)
    except Exception:  # concrete values are needed, or the step raises when it is run too
        pass
    else:
        updates, kept = map(_count_of_leaves, outputs)
        read_state = [False] * kept
        before = None
        while read_state != before:
            read = dce_jaxpr(closed.jaxpr, [True] * updates + read_state)[1]
            # A state leaf that this step reads has to be right at the end of the last step.
            before, read_state = read_state, read[count : count + kept]
    unread = [not each for each in read[:count]]
    if eager:
        known[structure] = unread
    return unread


def _count_of_leaves(tree: PyTree) -> int:
    """The number of leaves of a tree."""
    return len(jax.tree.leaves(tree))


def is_traced(tree: PyTree) -> bool:
    """Whether a tree contains a tracer, so that its values are not known now.

    Args:
        tree: arguments of a function that differs between eager and traced calls.
    """
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def without_unread(tree: Tree, unread: Sequence[bool]) -> Tree:
    """Replaces gradients that are unread by empty arrays, whose norm is 0.

    Args:
        tree: the gradients.
        unread: result of `find_unread`, one bool for each leaf.

    Returns:
        The tree to measure and judge, not to apply.
    """

    def empty(leaf: Leaf) -> jax.Array:
        del leaf
        return jnp.zeros((0,), jnp.float32)

    return _changed(tree, unread, empty)


def finite_unread(tree: Tree, unread: Sequence[bool]) -> Tree:
    """Replaces NaN and Inf of gradients that are unread by 0.

    No update depends on these gradients, so no step is skipped for them. But the optimizer may put
    them into moments, and a checkpoint with a NaN in it would count as bad.

    Args:
        tree: the gradients.
        unread: result of `find_unread`, one bool for each leaf.

    Returns:
        The gradients for the optimizer.
    """

    def finite(leaf: Leaf) -> jax.Array:
        return jnp.where(jnp.isfinite(leaf), leaf, 0)

    return _changed(tree, unread, finite)


def _changed(tree: Tree, unread: Sequence[bool], change: Callable[[Leaf], jax.Array]) -> Tree:
    """Changes the gradients of a tree that are `unread`."""
    leaves, structure = jax.tree.flatten(tree)
    new = []
    for leaf, is_unread in zip(leaves, unread, strict=True):
        if is_unread and is_gradient(leaf):
            leaf = change(leaf)
        new.append(leaf)
    return structure.unflatten(new)
