"""`--set clip.max_norm=1.0`: a value to replace in a policy, written as in its file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from typing import Annotated, Any

import typer

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A value to replace in the policy, as in clip.max_norm=1.0. Repeat it for more.",
    ),
]


def overrides_of(pairs: Iterable[str] | None) -> dict[str, Any]:
    """The keywords for `healcore.policy.load`.

    Args:
        pairs: `KEY=VALUE`, the key dotted, the value as in TOML; a word needs no quotes here.

    Raises:
        healcore.policy.PolicyError: a pair is not of that form.
    """
    from healcore.policy.errors import PolicyError, Problem
    from healcore.policy.overriding import merged

    found: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        texts = (f"{key} = {value}", f"{key} = {json.dumps(value.strip())}")
        tables = [table for table in map(_parsed, texts) if table] if equals and value else []
        if not tables:
            rule = "KEY=VALUE with the dotted key of a value; rules are changed in a file"
            problem = Problem("--set", pair, rule, "--set clip.max_norm=1.0, --set mode=observe")
            raise PolicyError("on the command line", (problem,))
        found = merged(found, tables[0])
    return found


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except ValueError:
        return None
