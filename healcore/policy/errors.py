"""Errors of a policy: key, received value, rule, and what to write instead."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from healcore.core.errors import HealcoreError
from healcore.policy.clip import KINDS
from healcore.policy.table import NONE, Table

Path = tuple[str | int, ...]

_MAX_PROBLEMS = 100
"""Limit of reported problems, because each one searches all keys for a close match."""
_MAX_SHOWN = 60
"""Limit of the characters of a received value."""

_EXAMPLES = {
    "schema": "schema = 1",
    "name": 'name = "mine"',
    "references": 'references = ["arXiv:2504.02507"]',
    "respond": "[[respond]]",
    "to": 'to = ["nonfinite"]',
    "do": 'do = ["skip"]',
}
"""What to write for a key without a default."""


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
        problems: in the order of the file where it is known.
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


def problems_in(error: ValidationError, root: type[Table]) -> tuple[Problem, ...]:
    """Converts pydantic's errors, in pydantic's order; `root` is the model of the document."""
    problems: list[Problem] = []
    details = error.errors(include_url=False)
    for detail in details[:_MAX_PROBLEMS]:
        problems.extend(_problems(detail, root))
    if len(details) > _MAX_PROBLEMS:
        rule = f"{len(details) - _MAX_PROBLEMS} more keys are wrong"
        problems.append(Problem("policy", "", rule, "correct the problems above first"))
    return tuple(problems)


def _problems(detail: ErrorDetails, root: type[Table]) -> Iterator[Problem]:
    path, table = _locate(detail["loc"], root)
    kind, value, context = detail["type"], show_value(detail["input"]), detail.get("ctx", {})
    if kind == "conflict":
        for inner, received, rule, write in context["conflicts"]:
            yield Problem(dotted((*path, *inner)), show_value(received), rule, write)
    elif kind == "missing":
        yield Problem(dotted(path), "", "required, and missing", _EXAMPLES[str(path[-1])])
    elif kind == "extra_forbidden":
        rule, write = "a key of this table", _known_keys(str(path[-1]), table, root)
        yield Problem(dotted(path), value, rule, write)
    elif kind in ("union_tag_not_found", "union_tag_invalid"):
        received = detail["input"].get("kind") if isinstance(detail["input"], dict) else None
        rule = "one of " + ", ".join(f'"{name}"' for name in KINDS)
        value = "" if received is None else show_value(received)
        choices = [] if received is None else list(KINDS)
        close = difflib.get_close_matches(str(received), choices, n=1, cutoff=0.6) or ["zclip"]
        yield Problem(dotted((*path, "kind")), value, rule, f"kind = {show_value(close[0])}")
    elif kind == "rule":
        received = detail["input"]
        if "entry" in context:
            path, received = (*path, context["entry"]), received[context["entry"]]
        rule, write = context["rule"], _instead(path, table, received, context.get("choices", ()))
        yield Problem(dotted(path), show_value(received), rule, write)
    else:  # not a table: model_type, model_attributes_type, dict_type
        rule_itself = len(path) == 2 and path[0] == "respond"
        write = "[[respond]]" if rule_itself else f"[{dotted(path)}]" if path else "key = value"
        yield Problem(dotted(path) or "policy", value, "a table", write)


def _locate(loc: Path, root: type[Table]) -> tuple[Path, type[Table]]:
    """The path without pydantic's markers, and the table that should hold the last key."""
    path: list[str | int] = []
    table = root
    rest = list(loc)
    while rest:
        part = rest.pop(0)
        path.append(part)
        field = _field(table, part)
        if field is None:
            continue
        inner = _tables(field.annotation)
        if part == "clip" and rest and rest[0] in KINDS:
            inner = [KINDS[str(rest.pop(0))]]  # the union's tag, which is not in the file
        while rest and isinstance(rest[0], int):
            path.append(rest.pop(0))
        if inner and rest:
            table = inner[0]
    return tuple(path), table


def _field(table: type[Table], key: str | int) -> FieldInfo | None:
    for name, field in table.model_fields.items():
        if key in (name, field.alias):
            return field
    return None


def _tables(annotation: Any) -> list[type[Table]]:
    """The tables in an annotation such as `Plateau | None` or `tuple[Respond, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return [annotation]
    return [table for part in get_args(annotation) for table in _tables(part)]


def _keys(table: type[Table]) -> list[str]:
    return [field.alias or name for name, field in table.model_fields.items()]


def _known_keys(key: str, table: type[Table], root: type[Table]) -> str:
    known = _keys(table)
    tables = [place for place, keys in _places(root) if key in keys]
    if tables:  # an existing key is misplaced, not misspelt
        return f"{key!r} under {' or '.join(tables)}"
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"one of {', '.join(known)}" if known else "nothing: this table has no keys"


def _places(root: type[Table]) -> Iterator[tuple[str, list[str]]]:
    """Yields each table of the format with its keys, to locate a misplaced key."""
    yield "the top of the file", _keys(root)
    for kind, table in KINDS.items():
        yield f'[clip] with kind = "{kind}"', _keys(table)
    for name, field in root.model_fields.items():
        for table in _tables(field.annotation):
            if name not in ("clip", "respond"):
                yield f"[{name}]", _keys(table)
            elif name == "respond":
                yield "[[respond]]", _keys(table)
        if name == "detect":
            for part, inner in _tables(field.annotation)[0].model_fields.items():
                yield f"[detect.{part}]", _keys(_tables(inner.annotation)[0])


def _instead(path: Path, table: type[Table], received: Any, choices: tuple[str, ...]) -> str:
    """A valid line to write: the closest choice, the number as an int, or the default."""
    close = difflib.get_close_matches(str(received), choices, n=1, cutoff=0.6)
    if isinstance(path[-1], int):  # an entry of a list
        if received in choices:
            return "drop the second entry"
        return (
            show_value(close[0]) if close else "one of these" if choices else "a string in quotes"
        )
    key = path[-1]
    if key in _EXAMPLES:
        return _EXAMPLES[key]
    field = _field(table, key)
    default = field.default if field is not None else PydanticUndefined
    if isinstance(default, int) and isinstance(received, float) and received.is_integer():
        default = int(received)
    value = close[0] if close else NONE if default is None else default
    return f"{key} = {show_value(value)}"
