"""Finds gradients that an optimizer does not read, for instance of parameters frozen by optax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.interpreters.partial_eval import dce_jaxpr

from healcore.jax.gradients import is_gradient

Tree = TypeVar("Tree")


def find_unread(step: Callable[..., tuple[Any, Any]], *args: Any) -> list[bool]:
    """Whether each leaf of the gradients influences no update of this or any later step.

    Args:
        step: a pure function ``(gradients, state, params) -> (updates, state)``. It is traced.
        *args: its arguments.
    """
    closed, outputs = jax.make_jaxpr(step, return_shape=True)(*args)
    gradients, updates, kept = (len(jax.tree.leaves(each)) for each in (args[0], *outputs))
    read_state = [False] * kept
    while True:
        read = dce_jaxpr(closed.jaxpr, [True] * updates + read_state)[1]
        # A state leaf that this step reads has to be right at the end of the last step.
        before, read_state = read_state, read[gradients : gradients + kept]
        if read_state == before or all(read[:gradients]):
            return [not each for each in read[:gradients]]


class UnreadGradients:
    """Calls `find_unread` in each trace, and once in eager code, for gradients of one structure."""

    def __init__(self) -> None:
        self._last: tuple[Any, list[bool]] | None = None

    def find(self, step: Callable[..., tuple[Any, Any]], *args: Any) -> list[bool]:
        """See `find_unread`. A step that cannot be traced reads every gradient."""
        structure = jax.tree.structure(args[0])
        traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args))
        if traced or self._last is None or self._last[0] != structure:
            try:
                unread = find_unread(step, *args)
            except Exception:  # concrete values are needed, or the step raises when it is run too
                unread = [False] * structure.num_leaves
            if traced:
                return unread
            self._last = structure, unread
        return self._last[1]


def without(tree: Tree, unread: Sequence[bool]) -> Tree:
    """Replaces gradients that are `unread` by empty arrays, whose norm is 0."""
    return _changed(tree, unread, lambda leaf: jnp.zeros((0,), jnp.float32))


def finite(tree: Tree, unread: Sequence[bool]) -> Tree:
    """Replaces NaN and Inf of gradients that are `unread` by 0: their moments stay finite."""
    return _changed(tree, unread, lambda leaf: jnp.where(jnp.isfinite(leaf), leaf, 0))


def _changed(tree: Tree, unread: Sequence[bool], change: Callable[[Any], jax.Array]) -> Tree:
    leaves, structure = jax.tree.flatten(tree)
    for i, leaf in enumerate(leaves):
        if unread[i] and is_gradient(leaf):
            leaves[i] = change(leaf)
    return structure.unflatten(leaves)
