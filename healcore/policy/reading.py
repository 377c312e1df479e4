"""`from_dict`: pydantic reads a document by the tables of `Policy`; each error is a `Problem`.

`PolicyError` has the problems of a policy, each with its key, value, rule and correction.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from healcore.console import stacklevel_of_program
from healcore.core.errors import HealcoreError
from healcore.policy.document import SCHEMA, Conflict, Path, Policy, is_table

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
        if count == 1:
            noun = "problem"
        else:
            noun = "problems"
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
        else:
            key += f".{part}"
    return key.removeprefix(".")


@functools.cache
def _reader() -> TypeAdapter[Policy]:
    return TypeAdapter(Policy, config=ConfigDict(strict=True))


def from_dict(data: Mapping[str, Any], *, source: str = "<dict>") -> Policy:
    """Validates a policy given as nested mappings and lists, as `to_dict` writes it.

        document = {"schema": 1, "name": "mine", "detect": {"nonfinite": {}}}
        policy = healcore.policy.from_dict(document)

    Args:
        data: the document.
        source: name of the document in error messages.

    Returns:
        The policy.

    Raises:
        PolicyError: as `load`, with every wrong value of the document, or else every conflict.
    """
    # Check the schema first: keys of another schema would give many misleading errors.
    if isinstance(data, Mapping):
        schema = data.get("schema")
    else:
        schema = None
    if isinstance(schema, int) and schema != SCHEMA:
        rule = f"{SCHEMA}, the version of the file format that this release reads"
        write = "schema = 1, or upgrade healcore if a newer one wrote the file"
        raise policy_error(source, show_value(schema), rule, write, key="schema")
    try:
        policy = _reader().validate_python(data)
    except ValidationError as error:
        found = [_conflict(dict(each)) for each in error.errors(include_url=False)]
    else:
        found = [*_conflicts(policy), *policy.conflicts()]
        if not found:
            if policy.incident.alert_steps:  # 0, as `to_dict` writes it, is the default
                warnings.warn(
                    "the policy key incident.alert_steps is deprecated, and healcore 0.6 removes "
                    "it: leave it out, incident.quiet_steps separates faults",
                    DeprecationWarning,
                    stacklevel_of_program(),
                )
            return policy
    problems = [Problem(dotted(path), _shown(data, path), *more) for path, *more in found]
    raise PolicyError(source, tuple(problems))


def _shown(data: Any, path: Path) -> str:
    """The received value, or an empty string without one."""
    try:
        for part in path:
            data = data[part]
    except (KeyError, IndexError, TypeError):
        return ""
    return show_value(data)


def _conflicts(table: Any, path: Path = ()) -> Iterator[Conflict]:
    """Yields the values that do not fit the others, in a table and in the tables in it."""
    for name, value in table._asdict().items():
        if is_table(value):
            yield from _conflicts(value, (*path, name))
    for name, limit in getattr(table, "AT_MOST", ()):
        largest = attrgetter(limit)(table)
        if getattr(table, name) > largest:
            write = f"{name} = {largest}, or a larger {limit}"
            yield (*path, name), f"at most {limit}, which is {largest}", write


def _tables(table: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the tables of a policy by their names, as pydantic has them in an error."""
    yield path, table
    for name, hint in get_type_hints(table).items():
        for part in get_args(hint) or (hint,):
            if is_table(part):
                if hasattr(part, "kind"):
                    kind = (part.kind,)
                else:
                    kind = ()
                yield from _tables(part, (*path, name, *kind))


def _conflict(error: dict[str, Any]) -> Conflict:
    """What an error of pydantic means to the author of a policy."""
    path, wrong, context = error["loc"] or ("policy",), error["input"], error.get("ctx", {})
    names = tuple(part for part in path if isinstance(part, str))
    table = dict(_tables(Policy)).get(names[:-1])
    if names[:1] == ("clip",):
        path = (*path[:1], *path[2:])  # pydantic has the kind too
    rule = error["msg"].removeprefix("Input should be ").replace("tuple", "list")
    if isinstance(wrong, float) and "than" in rule:
        rule += ", also as a float32"
    choices = re.findall("'(.+?)'", context.get("expected_tags", context.get("expected", "")))
    write = "see docs/policies.md"
    match error["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument" if table:
            wrong, rule = path[-1], "a key of this table"
            choices = [*table._fields, *(["kind"] if hasattr(table, "kind") else [])]
            if len(path) == 1:
                rule = "a key of a policy, or an argument of the function that you call"
        case "union_tag_invalid":
            path, wrong = (*path, "kind"), context["tag"]
        case "named_tuple_type" | "arguments_type" | "union_tag_not_found":
            rule, write = "a table", f"[{dotted(path)}] in a file, {path[0]}={{...}} as a keyword"
        case _ if table and path[-1] in table._field_defaults:
            write = f"{path[-1]} = {show_value(table._field_defaults[path[-1]])}"
    if choices:
        write = f"one of {', '.join(choices)}"
    similar = difflib.get_close_matches(str(wrong), choices, n=1, cutoff=0.75)
    return path, rule, f"did you mean {similar[0]!r}?" if similar else write
