"""The engine's state as a tree: nested NamedTuples, tuples, arrays and None."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import numpy as np

State = TypeVar("State")

# Kinds of the fields of a state, see `zeros`. The arrays are of NumPy, JAX or torch.
Float = Annotated[Any, np.float32]
Int = Annotated[Any, np.int32]
Flag = Annotated[Any, np.bool_]


def zeros(kind: type[State], shape: tuple[int, ...] = ()) -> State:
    """Returns a state of zeros in NumPy; its fields are `Float`, `Int`, `Flag` or other states."""
    return kind(
        *(
            np.zeros(shape, hint.__metadata__[0]) if get_origin(hint) else zeros(hint, shape)
            for hint in _hints(kind)
        )
    )


@functools.cache
def _hints(kind: type) -> tuple[Any, ...]:
    return tuple(get_type_hints(kind, include_extras=True).values())


def zero_init(kind: type[State]) -> Callable[..., State]:
    """Makes a method `init` that returns `zeros(kind)`."""

    def init(self: Any, *, groups: int = 0) -> State:
        """Returns the state before the first step."""
        del self, groups
        return zeros(kind)

    return init


def map_leaves(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Applies `fn` to each array of `tree` and the matching arrays of `rest`; keeps None."""
    if tree is None:
        return None
    if isinstance(tree, tuple):
        mapped = [map_leaves(fn, *parts) for parts in zip(tree, *rest, strict=True)]
        return type(tree)(*mapped) if hasattr(tree, "_fields") else tuple(mapped)
    return fn(tree, *rest)


def leaves(tree: Any) -> list[Any]:
    """Returns the arrays of `tree`, depth first."""
    if tree is None:
        return []
    if isinstance(tree, tuple):
        return [leaf for part in tree for leaf in leaves(part)]
    return [tree]


def pick(condition: Any, old: Any, new: Any, *, xp: Any) -> Any:
    """Returns `where(condition, old, new)`; `new` may have more trailing axes than `condition`."""
    if old is new:
        return new
    trailing = (None,) * (new.ndim - condition.ndim)
    return xp.where(condition[(..., *trailing)] if trailing else condition, old, new)
