"""Finds, before a step is decided, that the optimizer makes NaN or Inf of finite gradients.

The usual reason is a number that all tensors share: a learning rate of NaN, or a `b2` of 0.999 that
`optax.inject_hyperparams` has rounded to 1 in bfloat16, so that Adam divides 0 by 0. Such a number
spoils the update of every tensor, so it is enough to look at the smallest tensor. Its update is
computed a second time, before the decision, by the operations on which it depends.

Rejected: to check the updates of all tensors. The decision selects between the old and the new
moments, so every update would be computed twice: 2 M float32 parameters with adamw on 2 CPU cores
take 14.3 ms a step instead of 6.4 ms. An element of a large tensor that divides 0 by 0 does no harm
either, because `gradients.fill_bad` keeps a parameter whose update is not finite.

Rejected: to keep the old moments of such an element too. The test of each moment makes a step of 25
M parameters a quarter slower, and the next save finds moments that are NaN anyway.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend import core as jex
from jax.interpreters.partial_eval import dce_jaxpr

from healcore.jax.gradients import compiled, is_gradient, is_traced

MAX_ELEMENTS = 1 << 16
"""Elements of all arrays that the check of one tensor may read. A larger check is skipped."""
MAX_TENSORS = 8
"""Number of tensors to check, smallest first. One is not enough, because each partition of an
optimizer has numbers of its own."""
_LOOPS = {"while", "scan"}
"""Operations that may take any time, so a check that contains one is not cheap."""


def makes_nonfinite(step: Callable[..., Any], keywords: dict[str, Any], *args: Any) -> Any:
    """Whether the updates of small tensors are not finite although their gradients are.

    `protect` calls this function before its decision, so that such a step is skipped. Without it,
    the NaN would be in the moments after the step.

    Args:
        step: the optimizer's own step, ``(gradients, state, params, **keywords) -> (updates,
            state)``, a pure function.
        keywords: further keywords of the step.
        args: gradients, state and parameters.

    Returns:
        bool 0-d, or None if no check is cheap or the step cannot be traced.
    """
    try:
        if is_traced((args, keywords)):
            return _check(step, args, keywords)
        return _compiled_check(step, args, keywords)
    except Exception:  # concrete values are needed, or the step raises when it is run too
        return None


def _check(step: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Traces the step, and evaluates only the operations for the updates of small tensors."""

    def step_of(*given: Any) -> Any:
        return step(*given, **keywords)

    closed, outputs = jax.make_jaxpr(step_of, return_shape=True)(*args)
    leaves = jax.tree.leaves(args)
    found = []
    for jaxpr, used in _cheap_parts(closed.jaxpr, jax.tree.leaves(outputs[0]), args):
        inputs = list(itertools.compress(leaves, used))
        (update,) = eval_jaxpr(jaxpr, closed.consts, *inputs)
        found.append(jnp.isfinite(update).all())
    if not found:
        return None
    return ~functools.reduce(operator.and_, found)


_compiled_check = compiled(_check, static=(0,))


def _cheap_parts(jaxpr: Any, updates: list[Any], args: tuple[Any, ...]) -> Iterator[Any]:
    """Yields the operations for the updates of small tensors, with the inputs that they read.

    One tensor for each set of 0-d inputs (rates, counts, injected numbers) and dtype, because
    tensors of the same set fail together.
    """
    gradients = len(jax.tree.leaves(args[0]))

    def size_of(place: int) -> int:
        return updates[place].size

    places = []
    for place, update in enumerate(updates):
        if is_gradient(update) and update.size:
            places.append(place)
    seen = set()
    for place in sorted(places, key=size_of)[:MAX_TENSORS]:
        wanted = [False] * len(jaxpr.outvars)
        wanted[place] = True
        part, used = dce_jaxpr(jaxpr, wanted)
        shared_inputs = []
        size = 0
        for i, variable in enumerate(jaxpr.invars):
            if used[i]:
                size += variable.aval.size
                if not variable.aval.shape:
                    shared_inputs.append(i)
        shared = tuple(shared_inputs)
        reads_gradient = any(used[:gradients])
        if not reads_gradient or (shared, updates[place].dtype) in seen:
            continue
        if size > MAX_ELEMENTS or _LOOPS & _primitives(part.eqns):
            continue
        seen.add((shared, updates[place].dtype))
        yield part, used


def _primitives(eqns: Iterable[Any]) -> set[str]:
    """The names of all operations, also within the functions that operations call."""

    def is_jaxpr(value: Any) -> bool:
        return isinstance(value, jex.ClosedJaxpr)

    names = set()
    for eqn in eqns:
        names.add(eqn.primitive.name)
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
            inner = getattr(value, "jaxpr", value)
            names |= _primitives(getattr(inner, "eqns", ()))
    return names
