"""The constants that an optimizer is made with, such as the peak of its learning rate.

`optax.adamw(1e-3)` keeps its numbers in Python functions, so an optimizer state does not hold them,
and a checkpoint does not restore them. A restart compares them with the constants at the run's
first start, to say that the program has changed. `protect` knows the optimizer and the Healer knows
the state. So this file keeps the optimizers by the form of their states.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from healcore.core.numerics import shortest_decimal
from healcore.jax.array_leaves import PyTree

_MAX_SIZE = 64
"""Number of elements up to which a constant array is read. A larger one is data of the program."""


class _Optimizer(NamedTuple):
    """An optimizer that `protect` has wrapped."""

    update: Callable[..., Any]
    params: PyTree
    """`jax.ShapeDtypeStruct` of each parameter."""
    state: PyTree
    """`jax.ShapeDtypeStruct` of each leaf of its state."""


_newest_optimizers: dict[Any, _Optimizer] = {}
"""Form of a state -> the newest optimizer with such a state."""


def remember(update: Callable[..., Any], params: PyTree, state: PyTree) -> None:
    """Remembers an optimizer for `constants_of`. Called by `init` of `protect`.

    Args:
        update: the `update` of the optimizer.
        params: its parameters, traced or not.
        state: its initial state.
    """
    _newest_optimizers[_form(state)] = _Optimizer(update, _abstract(params), _abstract(state))


def constants_of(state: PyTree) -> list[float]:
    """Finds the constants of the optimizer with a state of this form. Traces one of its updates.

    Args:
        state: the inner state of `protect`.

    Returns:
        The floating constants of the update without repeats, ascending. Empty if this process has
        not made the optimizer, or if its update needs more than gradients, state and parameters.
    """
    known = _newest_optimizers.get(_form(state))
    if known is None:
        return []
    try:
        with warnings.catch_warnings():  # of keywords that only the program's own call passes
            warnings.simplefilter("ignore")
            traced = jax.make_jaxpr(known.update)(known.params, known.state, known.params)
    except Exception:  # it needs a mesh axis or other arguments, or concrete values
        return []
    found = {shortest_decimal(np.float32(value)) for value in _constants(traced)}
    return sorted(float(each) for each in found if np.isfinite(each))


def _constants(traced: ClosedJaxpr) -> Iterator[float]:
    """The floating constants of a jaxpr and of the jaxprs in it, with repeats."""
    for array in traced.consts:
        if np.size(array) <= _MAX_SIZE:
            yield from _floats(array)
    for equation in traced.jaxpr.eqns:
        for variable in equation.invars:
            if isinstance(variable, Literal):
                yield from _floats(variable.val)
        for parameter in equation.params.values():
            for part in jax.tree.leaves(parameter, is_leaf=_is_jaxpr):
                if isinstance(part, Jaxpr):
                    part = ClosedJaxpr(part, ())
                if isinstance(part, ClosedJaxpr):
                    yield from _constants(part)


def _is_jaxpr(node: Any) -> bool:
    """Whether a parameter of an equation is a function that was traced too."""
    return isinstance(node, Jaxpr | ClosedJaxpr)


def _floats(value: Any) -> Iterator[float]:
    """The elements of a floating constant. Nothing for an integer or a random key."""
    if jnp.issubdtype(jnp.result_type(value), jnp.floating):
        yield from np.asarray(jax.device_get(value), np.float32).ravel().tolist()


def _form(state: PyTree) -> Any:
    """Shape and dtype of each leaf, which are the same in each form that a program passes."""
    leaves = jax.tree.leaves(state)
    return tuple((jnp.shape(leaf), str(jnp.result_type(leaf))) for leaf in leaves)


def _abstract(tree: PyTree) -> PyTree:
    """The tree with shape and dtype in place of each array."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), tree
    )
