"""Defines the keyword arguments that replace values of a preset or a file."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

_Table = Mapping[str, Any]


class Overrides(TypedDict, total=False):
    """The keywords of `load` and of everything with a `policy` argument: keys of a policy file.

    A table is a mapping with the keys to change, `clip={"max_norm": None}`; its other keys stay.
    None is no limit for a number that may be absent, no detector for a table under `detect`, and no
    clipping for `clip` and `update_clip`. Lists are replaced as a whole, and so is `clip` if its
    `kind` changes.
    """

    name: str
    description: str
    references: Sequence[str]
    mode: Literal["heal", "observe"]
    max_skips: int
    grace_steps: int
    clip: _Table | None
    update_clip: _Table | None
    detect: _Table
    respond: Sequence[_Table]
    incident: _Table
    rollback: _Table
    lr: _Table
    budget: _Table
    retry: _Table
    skip_batch: _Table
    hang: _Table


def check_keywords(function: Callable[..., Any], overrides: Mapping[str, Any]) -> None:
    """Raises TypeError for a keyword that looks like a misspelt option of a function.

    Keywords that are like a key of a policy are left to the policy's own check.
    """
    keys = list(Overrides.__annotations__)
    parameters = inspect.signature(function).parameters.values()
    options = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    for name in overrides:
        close = difflib.get_close_matches(name, [*options, *keys], n=1)
        if name not in keys and close and close[0] in options:
            raise TypeError(
                f"{name!r} is neither an option of {function.__qualname__.split('.')[0]} nor a key "
                f"of a policy: did you mean {close[0]!r}?"
            )


def merged(data: _Table, overrides: _Table) -> dict[str, Any]:
    """A copy of a document with some values replaced; neither argument is checked or changed."""
    new = dict(data)
    for key, value in overrides.items():
        old = new.get(key, {})
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            kind = old.get("kind")
            # The numbers of one kind of clipping mean nothing to another.
            new[key] = merged(old if value.get("kind", kind) == kind else {}, value)
        else:
            new[key] = {"kind": "none"} if key == "clip" and value is None else value
    return new
