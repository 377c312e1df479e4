"""States as trees of arrays: NamedTuples, tuples, arrays and None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import numpy as np

State = TypeVar("State")


def zeros(kind: type[State], shape: tuple[int, ...] = ()) -> State:
    """A state of zeros in NumPy.

    Args:
        kind: a NamedTuple whose fields are annotated as `Float`, `Int`, `Flag` or other such
            NamedTuples. The annotation gives the dtype.
        shape: of each array.
    """
    fields = []
    for hint in get_type_hints(kind, include_extras=True).values():
        if get_origin(hint) is Annotated:
            fields.append(np.zeros(shape, hint.__metadata__[0]))
        else:
            fields.append(zeros(hint, shape))
    return kind(*fields)


def zero_init(kind: type[State]) -> Callable[..., State]:
    """Makes a method `init` for a detector or a rule whose state begins with zeros.

    Args:
        kind: the NamedTuple of the state.

    Returns:
        The method. It accepts `groups` as the methods `init` of clipping rules do, and ignores it.
    """

    def init(self: Any, *, groups: int = 0) -> State:
        """The state before the first step."""
        del self, groups
        return zeros(kind)

    return init


def map_leaves(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Applies `fn` to each array of `tree` and the matching arrays of `rest`; keeps None.

    It works as `jax.tree.map`, for trees of NamedTuples and tuples.

    Examples:
        >>> map_leaves(lambda a, b: a + b, (1, None, (2,)), (10, None, (20,)))
        (11, None, (22,))
    """
    if tree is None:
        return None
    if isinstance(tree, tuple):
        mapped = [map_leaves(fn, *parts) for parts in zip(tree, *rest, strict=True)]
        if hasattr(tree, "_fields"):
            return type(tree)(*mapped)
        return tuple(mapped)
    return fn(tree, *rest)
