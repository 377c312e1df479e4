"""From a policy back to TOML."""

from __future__ import annotations

from typing import Any

import tomli_w

from healcore.policy.document import Policy
from healcore.policy.table import Table
from healcore.policy.values import NONE


def dumps(policy: Policy) -> str:
    """Writes a policy as TOML, every key spelt out, so that a later default changes nothing in it.

    `loads(dumps(policy)) == policy`: numbers are written with all their digits, as they were
    given, not as the float32 that the core will see.
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
