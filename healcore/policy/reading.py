"""`from_dict`: pydantic reads a document by the tables of `Policy`; each error is a `Problem`."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from healcore.core.ranges import NONE
from healcore.policy.document import SCHEMA, Policy, is_table
from healcore.policy.problems import Path, PolicyError, Problem, dotted, policy_error, show_value
from healcore.policy.responses import Conflict

_EXAMPLES = {
    "schema": "schema = 1",
    "name": 'name = "mine"',
    "policy": "a mapping of the tables of a policy file",
    "respond": "[[respond]]",
    "to": 'to = ["nonfinite"]',
    "do": 'do = ["skip"]',
}
"""What to write for a key without a default."""


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
    schema = data.get("schema") if isinstance(data, Mapping) else None
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
                kind = (part.kind,) if hasattr(part, "kind") else ()
                yield from _tables(part, (*path, name, *kind))


def _conflict(error: dict[str, Any]) -> Conflict:
    """What an error of pydantic means to the author of a policy."""
    path, wrong = error["loc"] or ("policy",), error["input"]
    name = path[-1]
    names = tuple(part for part in path if isinstance(part, str))
    table = dict(_tables(Policy)).get(names[:-1])
    if names[:1] == ("clip",):
        path = (*path[:1], *path[2:])  # pydantic has the kind too
    rule = error["msg"].removeprefix("Input should be ").replace("tuple", "list")
    if isinstance(wrong, float) and "than" in rule:
        rule += ", also as a float32"
    context = error.get("ctx", {})
    choices = re.findall("'(.+?)'", context.get("expected_tags", context.get("expected", "")))
    write = f"one of {', '.join(choices)}" if choices else "see docs/policies.md"
    match error["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument" if table:
            wrong, choices = name, list(table._fields)
            if hasattr(table, "kind"):
                choices.append("kind")
            rule, write = "a key of this table", f"one of {', '.join(choices)}"
            if len(path) == 1:
                rule = "a key of a policy, or an argument of the function that you call"
        case "missing" | "missing_argument":
            rule, write = "required, and missing", _EXAMPLES.get(name, write)
        case "union_tag_invalid":
            path, wrong, rule = (*path, "kind"), context["tag"], write
        case "named_tuple_type" | "arguments_type" | "union_tag_not_found":
            keyword = f"[{dotted(path)}] in a file, {path[0]}={{...}} as a keyword"
            rule, write = "a table", _EXAMPLES.get(path[0], keyword)
        case _ if name in _EXAMPLES:
            write = _EXAMPLES[name]
        case _ if isinstance(name, str) and table:
            default = table._field_defaults[name]
            write = f"{name} = {show_value(NONE if default is None else default)}"
    similar = difflib.get_close_matches(str(wrong), choices, n=1, cutoff=0.75)
    return path, rule, f"did you mean {similar[0]!r}?" if similar else write
