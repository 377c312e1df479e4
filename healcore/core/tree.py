"""Maps over the engine's state: nested NamedTuples, tuples, arrays and None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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
    trailing = (None,) * (new.ndim - condition.ndim)
    return xp.where(condition[(..., *trailing)] if trailing else condition, old, new)
