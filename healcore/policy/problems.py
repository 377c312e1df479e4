"""`PolicyError`: the problems of a policy, each with its key, value, rule and correction."""

from __future__ import annotations

import json
from typing import NamedTuple

from healcore.core.errors import HealcoreError

_MAX_SHOWN = 60
"""Limit of the characters of a received value."""

Path = tuple[str | int, ...]
"""The keys from the top of a document to a value; a number for an entry of a list."""


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
        received = " = ".join(filter(None, (self.key, self.value)))
        return f"{received}\n  rule:  {self.rule}\n  write: {self.write}"


class PolicyError(HealcoreError, ValueError):
    """An invalid policy. Raised when the policy is loaded, never during a run.

    The message lists every wrong value; without one, it lists every conflict between values.

    Attributes:
        source: the file, the preset's name, or "<text>".
        problems: at least one.
        unreadable: the file could not be read.
    """

    __module__ = "healcore"

    def __init__(
        self, source: str, problems: tuple[Problem, ...], *, unreadable: bool = False
    ) -> None:
        super().__init__(source, problems)
        self.source = source
        self.problems = problems
        self.unreadable = unreadable

    def _message(self) -> str:
        count = len(self.problems)
        noun = "problem" if count == 1 else "problems"
        lines = [f"policy {self.source}: {count} {noun}"]
        for problem in self.problems:
            lines += [f"  {line}" for line in str(problem).splitlines()]
        return "\n".join(lines)


def policy_error(
    source: str, value: str, rule: str, write: str, *, key: str = "", unreadable: bool = False
) -> PolicyError:
    """Makes an error with one problem.

    Args:
        source: see `PolicyError`.
        value: see `Problem`.
        rule: see `Problem`.
        write: see `Problem`.
        key: see `Problem`.
        unreadable: see `PolicyError`.
    """
    return PolicyError(source, (Problem(key, value, rule, write),), unreadable=unreadable)


def show_value(value: object) -> str:
    """Formats a received value nearly as TOML, shortened for a message.

    Args:
        value: any value, also of a type that TOML does not have.

    Returns:
        At most 60 characters.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (TypeError, ValueError, RecursionError):  # a key that is no str, a huge int, or a cycle
        return f"a {type(value).__name__} that cannot be printed"
    if len(text) > _MAX_SHOWN:
        return f"{text[: _MAX_SHOWN - 3]}..."
    return text


def dotted(parts: Path) -> str:
    """Joins a path into a key: `("respond", 0, "to")` becomes `respond[0].to`."""
    key = ""
    for part in parts:
        if isinstance(part, int):
            key += f"[{part}]"
            continue
        name = part
        bare = part.replace("_", "").replace("-", "")
        if not (bare.isascii() and bare.isalnum()):  # TOML needs quotes
            name = show_value(part)
        if key:
            key += "."
        key += name
    return key
