"""States as trees of arrays: NamedTuples, tuples, arrays and None; and their saved form.

The saved form is nested dicts of Python numbers, bools and lists. `json.dumps` accepts it, so a
state moves between frameworks, processes and machines. A float32 is saved exactly, because its repr
as a double is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import numpy as np

from healcore.core.array_namespace import Flag, xp
from healcore.core.errors import HealcoreError

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


def zero_init(kind: type[State], shape: tuple[int, ...] = ()) -> Callable[..., State]:
    """Makes a method `init` for a detector or a rule whose state begins with zeros.

    Args:
        kind: the NamedTuple of the state.
        shape: of each array.

    Returns:
        The method. It accepts `groups` as the methods `init` of clipping rules do, and ignores it.
    """

    def init(self: Any, *, groups: int = 0) -> State:
        """The state before the first step."""
        del self, groups
        return zeros(kind, shape)

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


def select(condition: Flag, chosen: State, other: State) -> State:
    """`chosen` where the condition holds, else `other`: `xp.where` for trees.

    Args:
        condition: bool 0-d, or with the batch axes of all leaves.
        chosen: a tree, in which a leaf may be a Python number.
        other: a tree of the same structure.
    """

    def leaf(a: Any, b: Any) -> Any:
        if a is b:
            return a
        trailing = (None,) * (len(b.shape) - len(condition.shape))
        return xp.where(condition[(..., *trailing)] if trailing else condition, a, b)

    return map_leaves(leaf, chosen, other)


# -- the saved form -------------------------------------------------------------------------------


class StateError(HealcoreError, ValueError):
    """A saved state that does not fit the policy; the message says where, and what to do.

    For example, the window of a detector has another length than in the saved state. A state with
    wrong shapes would fail much later, inside a compiled step.
    """

    __module__ = "healcore.errors"


def to_json_data(tree: Any) -> Any:
    """Converts a state or a policy to data that `json.dumps` accepts.

    Args:
        tree: a tree of NamedTuples, tuples, arrays and None.

    Returns:
        Dicts for tuples, by the names or the numbers of their parts, and numbers or nested lists
        for arrays. A float32 becomes the double with the same value.
    """
    if tree is None:
        return None
    if isinstance(tree, tuple):
        return {name: to_json_data(part) for name, part in _parts(tree).items()}
    return np.asarray(tree).tolist()


def _parts(tree: Any) -> dict[str, Any]:
    """The parts of a tuple by name, or by number."""
    names = getattr(tree, "_fields", None) or map(str, range(len(tree)))
    return dict(zip(names, tree, strict=True))


def from_json_data(template: Any, data: Any, place: str) -> Any:
    """Restores a state from the result of `to_json_data`.

    Args:
        template: a state of the policy, whose structure, dtypes and shapes the result has.
        data: the saved data, which may be damaged or of another policy.
        place: where the data are, for messages, such as "state.detectors".

    Returns:
        The state as NumPy arrays.

    Raises:
        StateError: the data do not fit the template, or hold NaN or Inf.
    """
    if template is None and data is None:
        return None
    if isinstance(template, np.ndarray):
        with suppress(TypeError, ValueError), np.errstate(all="ignore"):
            array = np.asarray(data, template.dtype if data == [] else None)
            cast = array.astype(template.dtype, casting="same_kind")
            # A float64 in JSON is the float32 itself; an integer may be too large.
            if cast.dtype.kind == "f":
                fits = np.isfinite(cast)
            else:
                fits = cast == array
            if cast.shape == template.shape and fits.all():
                return cast
    elif isinstance(template, tuple) and isinstance(data, Mapping):
        names = _parts(template)
        if set(data) == set(names):
            parts = [
                from_json_data(part, data[name], f"{place}.{name}") for name, part in names.items()
            ]
            return tuple.__new__(type(template), parts)
    raise StateError(
        f"{place} must be finite, with the form of {to_json_data(template)!r:.80}, got "
        f"{data!r:.80}: the saved state is damaged, or belongs to another policy; load the state "
        "with its own policy, or start from a fresh state"
    )
