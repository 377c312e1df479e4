"""`diff`: the keys in which two policies differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from healcore.policy.document import Policy, to_dict
from healcore.policy.tables import dotted


class Difference(NamedTuple):
    """A key with different values in two policies.

    Attributes:
        key: dotted key, for example `clip.z_threshold`.
        left: value in the first policy, or None if that policy lacks the key.
        right: value in the second policy, or None if that policy lacks the key.
    """

    key: str
    left: Any
    right: Any


def diff(left: Policy, right: Policy) -> tuple[Difference, ...]:
    """Compares two policies key by key, defaults included.

        left, right = load("default"), load("default", mode="observe")
        healcore.policy.diff(left, right)  # (Difference(key='mode', left='heal', right='observe'),)

    Args:
        left: a policy.
        right: another policy.

    Returns:
        The keys with different values, in the order of the file. Rules are compared by position. If
        only one policy has a table, each key of the table is listed, or the table itself if it is
        empty.
    """
    left_values = dict(_flat(to_dict(left)))
    right_values = dict(_flat(to_dict(right)))
    differences = []
    for key in {**left_values, **right_values}:  # a dict as an ordered set
        left_value = left_values.get(key)
        right_value = right_values.get(key)
        if left_value != right_value:
            differences.append(Difference(key, left_value, right_value))
    return tuple(differences)


def _flat(data: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yields the dotted key and the value of each entry of nested tables and lists of tables."""
    if isinstance(data, dict):
        entries = list(data.items())
    elif isinstance(data, list) and data and isinstance(data[0], dict):
        entries = list(enumerate(data))
    else:
        yield dotted(path), data
        return
    if not entries:
        yield dotted(path), {}
    for key, value in entries:
        yield from _flat(value, (*path, key))
