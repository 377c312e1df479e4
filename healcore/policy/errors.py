"""Errors of a policy: key, received value, rule, and what to write instead."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from healcore.core.errors import HealcoreError

Conflict = tuple[tuple[str | int, ...], Any, str, str]
"""Values of a table that exclude each other: the path from the table to the named value, this
value, the rule that it violates, and what to write instead."""

_MAX_SHOWN = 60
"""Limit of the characters of a received value."""


class Problem(NamedTuple):
    """One problem of a policy."""

    key: str
    """Dotted key, for example `clip.z_threshold` or `respond[0].to[1]`; "" for the file itself."""
    value: str
    """The received value as Python writes it, or an empty string if the key is missing."""
    rule: str
    """The condition that the value violates."""
    write: str
    """What to write instead."""

    def __str__(self) -> str:
        head = f"{self.key} = {self.value}" if self.key and self.value else self.key or self.value
        lines = [head, f"  rule:  {self.rule}", f"  write: {self.write}"]
        return "\n".join(line for line in lines if line)


class PolicyError(HealcoreError, ValueError):
    """An invalid policy. Raised when the policy is loaded, never during a run.

    Attributes:
        source: the file, the preset's name, or "<text>".
        problems: in the order of the documented keys.
        unreadable: the file could not be read.
    """

    def __init__(
        self, source: str, problems: tuple[Problem, ...], *, unreadable: bool = False
    ) -> None:
        super().__init__(source, problems)
        self.source = source
        self.problems = problems
        self.unreadable = unreadable

    def __str__(self) -> str:
        count = len(self.problems)
        head = f"policy {self.source}: {count} problem{'s' if count != 1 else ''}"
        body = "\n".join(str(problem) for problem in self.problems)
        return "\n".join([head, *(f"  {line}" for line in body.splitlines())])


def show_value(value: object) -> str:
    """Formats a received value nearly as TOML, shortened for a message."""
    try:
        if isinstance(value, bool):
            text = str(value).lower()
        else:
            text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # a huge int, or a cycle
        return f"a {type(value).__name__} too long to print"
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def dotted(parts: tuple[str | int, ...]) -> str:
    """Joins a path into a key: `("respond", 0, "to")` becomes `respond[0].to`."""
    key = ""
    for part in parts:
        if isinstance(part, int):
            key += f"[{part}]"
        else:
            bare = part.replace("_", "").replace("-", "")
            name = part if bare.isascii() and bare.isalnum() else show_value(part)
            key += f".{name}" if key else name
    return key
