"""`diff`: the keys in which two policies differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
        The keys with different values, in the order of the file. Rules for the same causes are
        compared, whatever their order, and have the number of the first policy. A rule that only
        the second policy has gets a number after these. If only one policy has a table, each key of
        the table is listed, or the table itself if it is empty.
    """
    left_data, right_data = to_dict(left), to_dict(right)
    right_data["respond"] = _matched(left_data["respond"], right_data["respond"])
    left_data["respond"] = dict(enumerate(left_data["respond"]))
    left_values = dict(_flat(left_data))
    right_values = dict(_flat(right_data))
    differences = []
    for key in {**left_values, **right_values}:  # a dict as an ordered set
        left_value = left_values.get(key)
        right_value = right_values.get(key)
        if left_value != right_value:
            differences.append(Difference(key, left_value, right_value))
    return tuple(differences)


def _matched(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The rules `right` by the number of the rule in `left` that each is compared with."""
    likeness: tuple[Callable[[Any, Any], bool], ...] = (
        lambda rule, other: rule == other,
        lambda rule, other: {*rule["to"]} == {*other["to"]} and rule["when"] == other["when"],
        lambda rule, other: {*rule["to"]} == {*other["to"]},
        lambda rule, other: not {*rule["to"]}.isdisjoint(other["to"]),
    )
    matched: dict[int, dict[str, Any]] = {}
    remaining = list(right)
    for is_like in likeness:
        for number, rule in enumerate(left):
            like = [other for other in remaining if is_like(rule, other)]
            if like and number not in matched:
                matched[number] = like[0]
                remaining.remove(like[0])
    return matched | dict(enumerate(remaining, len(left)))


def _flat(data: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yields the dotted key and the value of each entry of nested tables."""
    if not data or not isinstance(data, dict):
        yield dotted(path), data
        return
    for key, value in data.items():
        yield from _flat(value, (*path, key))
