"""Replaces values of a policy's document: the keywords of `load`, and `KEY=VALUE` of a command.

The functions work on nested mappings before validation. `reading.from_dict` validates the result.
"""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from healcore.core.ranges import NONE
from healcore.policy.problems import policy_error

Table = Mapping[str, Any]
"""A table of a policy file, not validated."""


class Overrides(TypedDict, total=False):
    """Keywords of `load` and of functions with a `policy` argument: the keys of a policy file.

        healcore.policy.load("default", clip={"max_norm": 1.0}, rollback={"probation": 50})

    A table is a mapping with the keys to change, `clip={"max_norm": None}`; other keys stay. For an
    optional number None means no limit, for a table under `detect` no detector, and for `clip` no
    clipping. Lists are replaced as a whole, and so is `clip` if its `kind` changes. One rule is
    changed by its number: `respond={0: {"do": ["alert"]}}`. A `max_norm` for a policy without
    clipping is the limit of `kind = "fixed"`.
    """

    name: str
    description: str
    references: Sequence[str]
    mode: Literal["heal", "observe"]
    max_skips: int
    grace_steps: int
    clip: Table | None
    detect: Table
    respond: Sequence[Table] | Mapping[int, Table]
    incident: Table
    rollback: Table
    lr: Table
    budget: Table
    retry: Table
    skip_batch: Table
    hang: Table


def merged(data: Table, overrides: Table, source: str) -> dict[str, Any]:
    """Replaces values of a document.

    Tables are merged key by key, and rules by their number; any other value replaces the old value.

    Args:
        data: the document, which is not changed.
        overrides: the values, as in `Overrides`.
        source: name of the document in error messages.

    Returns:
        The new document, which `from_dict` has to validate.

    Raises:
        PolicyError: the policy has no rule with a given number.
    """
    new = dict(overrides)
    rules, changes = data.get("respond", []), overrides.get("respond")
    if isinstance(rules, list) and isinstance(changes, Mapping):
        numbered = {str(number): rule for number, rule in enumerate(rules)}
        changed = {str(number): change for number, change in changes.items()}
        for number in changed.keys() - numbered.keys():
            rule = f"the number of a rule of this policy, which has {len(rules)} from 0"
            write = "respond[0], or respond with all rules"
            raise policy_error(source, "", rule, write, key=f"respond[{number}]")
        new["respond"] = [*_merged_tables(numbered, changed).values()]
    clip, changes = data.get("clip", {"kind": NONE}), overrides.get("clip")
    if isinstance(clip, Mapping) and isinstance(changes, Mapping):
        kind = clip.get("kind")
        if kind == NONE and "kind" not in changes:
            # A limit for a policy without clipping. Without a limit nothing changes.
            changes = {} if changes == {"max_norm": None} else {"kind": "fixed", **changes}
        if changes.get("kind", kind) != kind:
            clip = {}  # the keys of one kind do not fit another
        data, new["clip"] = {**data, "clip": clip}, changes
    return _merged_tables(data, new)


def _merged_tables(old: Any, changes: Table) -> dict[str, Any]:
    """A copy of nested tables with values replaced. A key that is not named stays."""
    new = dict(old) if isinstance(old, Mapping) else {}
    for key, value in changes.items():
        new[key] = _merged_tables(new.get(key), value) if isinstance(value, Mapping) else value
    return new


def parse_overrides(pairs: Iterable[str], option: str) -> dict[str, Any]:
    """Parses the `KEY=VALUE` pairs of an option of a command to the keywords of `load`.

    A key is dotted; `respond[0].do` is a key of the first rule. A value has the syntax of TOML, but
    a string needs no quotes. The pairs are only collected here: `load` merges them into the tables
    of the policy, whose kind of clipping decides which keys exist.

    Args:
        pairs: the pairs as the user wrote them. A later pair replaces an earlier one.
        option: name of the option in error messages, such as `--set`.

    Returns:
        The keywords of `load`, see `Overrides`.

    Raises:
        PolicyError: a pair is not `KEY=VALUE`.

    Examples:
        >>> parse_overrides(["clip.max_norm=1.0", "mode=observe"], "--set")
        {'clip': {'max_norm': 1.0}, 'mode': 'observe'}
    """
    overrides: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        key = re.sub(r"^\s*respond\[(\d+)\]", r"respond.\1", key)
        table: dict[str, Any] = {}
        # First as TOML, then as a string to which the user gave no quotes.
        for toml_value in (value, json.dumps(value.strip())):
            with contextlib.suppress(ValueError):
                table = table or tomllib.loads(f"{key} = {toml_value}")
        if not (value and table):
            rule = "must be KEY=VALUE with a dotted key"
            write = f"{option} clip.max_norm=1.0, {option} mode=observe"
            raise policy_error("on the command line", pair, rule, write, key=option)
        overrides = _merged_tables(overrides, table)
    return overrides
