"""Defines the errors of a policy: the key, the value received, the rule, and what to write."""

from __future__ import annotations

import json
from typing import NamedTuple

from healcore.core.errors import HealcoreError


class Problem(NamedTuple):
    """One problem of a policy."""

    key: str
    """Dotted key, for example `clip.z_threshold` or `respond[0].to[1]`; "" for the file itself."""
    value: str
    """What was received, as Python writes it; "" where nothing was."""
    rule: str
    """What has to hold."""
    write: str
    """What to write instead."""

    def __str__(self) -> str:
        head = f"{self.key} = {self.value}" if self.key and self.value else self.key or self.value
        lines = [head, f"  rule:  {self.rule}", f"  write: {self.write}"]
        return "\n".join(line for line in lines if line)


class PolicyError(HealcoreError, ValueError):
    """A policy that cannot be used. Raised when it is loaded, never during a run.

    Attributes:
        source: The file, the preset's name, or "<text>".
        problems: In the order of the file where that is known.
        unreadable: The file could not be read at all, so that its policy is not known.
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


def shown(value: object, limit: int = 60) -> str:
    """A received value nearly as TOML writes it, short enough for a message."""
    try:
        if isinstance(value, bool):
            text = str(value).lower()
        else:
            text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # whole numbers beyond sys.get_int_max_str_digits, cycles
        return f"a {type(value).__name__} too long to print"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def dotted(parts: tuple[str | int, ...]) -> str:
    """Joins a path into a key: `("respond", 0, "to")` is `respond[0].to`."""
    key = ""
    for part in parts:
        if isinstance(part, int):
            key += f"[{part}]"
        else:
            bare = part.replace("_", "").replace("-", "")
            name = part if bare.isascii() and bare.isalnum() else shown(part)
            key += f".{name}" if key else name
    return key
