"""Writes a policy as TOML and as plain data, compares two, and makes a fingerprint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import tomli_w

from healcore.policy.document import Policy
from healcore.policy.errors import dotted
from healcore.policy.table import Table
from healcore.policy.values import NONE


def dumps(policy: Policy) -> str:
    """Writes a policy as TOML with every key, so that a later default changes nothing in it.

    `loads(dumps(policy)) == policy`: numbers have all their digits, not those of the core's
    float32.
    """
    return tomli_w.dumps(to_dict(policy))


def to_dict(policy: Policy) -> dict[str, Any]:
    """The document as plain mappings, lists, strings, bools and numbers; JSON-safe."""
    return _plain(policy)


def _plain(table: Table) -> dict[str, Any]:
    """Absent tables are left out; an absent limit is the string "none"."""
    written: dict[str, Any] = {}
    for name, field in type(table).model_fields.items():
        value = getattr(table, name)
        key = field.alias or name
        if isinstance(value, Table):
            written[key] = _plain(value)
        elif isinstance(value, tuple):
            written[key] = [_plain(v) if isinstance(v, Table) else v for v in value]
        elif value is not None:
            written[key] = value
        elif field.metadata:  # a number or none; a table that may be absent has no metadata
            written[key] = NONE
    return written


class Difference(NamedTuple):
    """One key with two values; None where a policy does not have it."""

    key: str
    left: Any
    right: Any


def diff(left: Policy, right: Policy) -> tuple[Difference, ...]:
    """The keys whose values differ, in the order of the file, defaults included.

    Rules are compared by position. A table that only one policy has is listed key by key, an empty
    one as a whole.
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


def fingerprint(policy: Policy) -> str:
    """Sixteen hex digits, equal for equal numbers in the core (within one release of healcore).

    Name, description and references do not count, and numbers count as float32: 0.97 and
    0.9700000001 are one policy. The same as `Engine.fingerprint`.
    """
    found = policy.engine().fingerprint
    assert found is not None, "the numbers of a policy file are Python's"
    return found
