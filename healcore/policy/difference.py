"""What differs between two policies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from healcore.policy.document import Policy
from healcore.policy.dumping import to_dict
from healcore.policy.errors import dotted


class Difference(NamedTuple):
    """One key with two values; None where a policy does not have it."""

    key: str
    left: Any
    right: Any


def diff(left: Policy, right: Policy) -> tuple[Difference, ...]:
    """The keys whose values differ, in the order of the file, defaults included.

    Rules are compared by position. A table that only one policy has is listed key by key; an
    empty one as a whole.
    """
    a, b = dict(_flat(to_dict(left))), dict(_flat(to_dict(right)))
    keys = [*a, *(key for key in b if key not in a)]
    pairs = ((key, a.get(key), b.get(key)) for key in keys)
    return tuple(Difference(key, x, y) for key, x, y in pairs if x != y)


def _flat(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(data, dict):
        parts = list(data.items())
    elif isinstance(data, list) and data and isinstance(data[0], dict):
        parts = list(enumerate(data))
    else:
        yield dotted(path), data
        return
    if not parts:
        yield dotted(path), {}
    for key, value in parts:
        yield from _flat(value, (*path, key))
