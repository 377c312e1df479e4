"""Warns of what `protect` has no use for in the optimizer that it wraps: a clip, another engine.

Both are no errors: the program trains as it says. But the log would count clips of two kinds, and
two engines would judge each step.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import optax

from healcore.jax.heal_state import HealState
from healcore.jax.trees import PyTree, nodes

_CLIP = "clip_by_global_norm.<locals>."
"""Beginning of the name of the functions that `optax.clip_by_global_norm` makes."""
_MAX_OBJECTS = 1000
"""Number of objects within an optimizer in which a clip is searched."""


def warn_if_healed(inner_state: PyTree) -> None:
    """Warns if the optimizer has an engine of healcore already, as in `protect(protect(tx))`.

    Args:
        inner_state: the initial state of the optimizer.
    """
    if nodes(HealState, inner_state):
        warnings.warn(
            "protect() wraps an optimizer that has a protect(), heal() or heal_zclip() already, so "
            "two engines judge each step and both limit the learning rate: remove one of them",
            stacklevel=3,  # the caller of tx.init
        )


def warn_if_clipped(update: Callable[..., Any]) -> None:
    """Warns if `optax.clip_by_global_norm` is in an optimizer whose gradients `protect` clips.

    Finds it in a chain, also within `optax.MultiSteps`. It is hidden in a function that makes the
    optimizer later, as in `optax.inject_hyperparams`.

    Args:
        update: the `update` of the optimizer.
    """
    for function in _functions_in(update):
        if function.__qualname__.startswith(_CLIP):
            warnings.warn(
                "the optimizer clips its gradients (optax.clip_by_global_norm), and protect clips "
                "them too, as clip= says: remove optax.clip_by_global_norm",
                stacklevel=3,  # the caller of protect
            )
            return


def _functions_in(start: Any) -> Iterator[types.FunctionType]:
    """The functions that a function or a transformation is made of."""
    todo = [start]
    seen: set[int] = set()
    while todo and len(seen) < _MAX_OBJECTS:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, types.FunctionType):
            yield each
            for cell in each.__closure__ or ():
                todo += _content(cell)
        elif isinstance(each, optax.MultiSteps):
            todo += vars(each).values()
        elif isinstance(each, tuple | list):  # a GradientTransformation is a tuple
            todo += each


def _content(cell: types.CellType) -> list[Any]:
    """What a closure holds, or nothing before its variable is set."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []
