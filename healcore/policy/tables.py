"""Reads the tables of a policy file by their declarations, and finds every problem (`PolicyError`).

A table is a class with annotated fields and defaults. A field is a value (`healcore.core.ranges`),
another table, one of several tables with a `kind`, or a tuple of tables. A problem has the key, the
received value, the rule, and what to write instead.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple, get_args, get_type_hints

from healcore.core.errors import HealcoreError
from healcore.core.ranges import NONE, RuleBroken, Value, one_of, to_float32

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

    def _message(self) -> str:
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


Path = tuple[str | int, ...]

_EXAMPLES = {
    "schema": "schema = 1",
    "name": 'name = "mine"',
    "references": 'references = ["arXiv:2504.02507"]',
    "respond": "[[respond]]",
    "to": 'to = ["nonfinite"]',
    "do": 'do = ["skip"]',
}
"""What to write for a key without a default."""


class Key(NamedTuple):
    """The declaration of one key."""

    default: Any
    """Default, or `dataclasses.MISSING` for a required key."""
    value: Value | None
    """Rule of a value, or None for a table."""
    tables: tuple[type, ...]
    """Class of the table or of the tables in a list, or one class for each `kind`."""
    optional: bool
    """Whether the table may be absent."""
    several: bool
    """Whether the key has a list of tables."""


def is_table(kind: Any) -> bool:
    """Whether a class, or the class of an object, declares a table."""
    return hasattr(kind, "_fields") or dataclasses.is_dataclass(kind)


@functools.cache
def keys_of(table: type) -> dict[str, Key]:
    """The declarations of the keys of a table, in order."""
    if dataclasses.is_dataclass(table):
        defaults = {field.name: field.default for field in dataclasses.fields(table)}
    else:
        given = table._field_defaults  # type: ignore[attr-defined]
        defaults = {name: given.get(name) for name in table._fields}  # type: ignore[attr-defined]
    hints = get_type_hints(table, include_extras=True)
    keys = {}
    for name, default in defaults.items():
        hint = hints[name]
        (value,) = getattr(hint, "__metadata__", (None,))
        parts = (hint, *get_args(hint))
        tables = tuple(part for part in parts if isinstance(part, type) and is_table(part))
        keys[name] = Key(default, value, tables, type(None) in parts, Ellipsis in parts)
    return keys


def read_document(data: Any, root: type) -> tuple[Any, tuple[Problem, ...]]:
    """Reads a document. Returns the table, or None and the problems."""
    reader = _Reader()
    return reader.table(root, data, ()), tuple(reader.problems)


class _Reader:
    """Reads a document and collects its problems; a value with a problem becomes None."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def _problem(self, path: Path, value: Any, rule: str, write: str) -> None:
        shown = "" if value is dataclasses.MISSING else show_value(value)
        self.problems.append(Problem(dotted(path), shown, rule, write))

    def table(self, table: type, data: Any, path: Path, kinds: Mapping[str, type] = {}) -> Any:
        """Reads a table of one class. `kinds` has all classes of a table with a kind."""
        before = len(self.problems)
        if not isinstance(data, Mapping):
            write = f"[{dotted(path)}]" if path else "key = value"
            write = "[[respond]]" if path[:1] == ("respond",) and len(path) == 2 else write
            return self._problem(path or ("policy",), data, "a table", write)
        keys = keys_of(table)
        values = {}
        for name, key in keys.items():
            if name in data:
                values[name] = self._read(key, data[name], (*path, name))
            elif key.default is dataclasses.MISSING:
                write = _EXAMPLES[name]
                self._problem((*path, name), key.default, "required, and missing", write)
        known = ["kind", *keys] if hasattr(table, "kind") else list(keys)
        for name in (name for name in data if name not in known):
            close = _close(name, known)
            rule, write = "a key of this table", f"one of {', '.join(known)}"
            if kinds:
                others = [f'"{kind}"' for kind, other in kinds.items() if name in keys_of(other)]
                rule = f'a key of this table, [{dotted(path)}] with kind = "{table.kind}"'  # type: ignore[attr-defined]
                write += f"; kind = {' or '.join(others)} has {name}" if others else ""
            elif close:
                write = f"did you mean {close!r}?"
            self._problem((*path, str(name)), data[name], rule, write)
        if len(self.problems) > before:
            return None
        found = table(**values)
        for name, limit in getattr(table, "AT_MOST", ()):
            value, most = getattr(found, name), attrgetter(limit)(found)
            if value > most:
                write = f"{name} = {most}, or a larger {limit}"
                self._problem((*path, name), value, f"at most {limit}, which is {most}", write)
        for inner, *problem in found.conflicts() if hasattr(table, "conflicts") else ():
            self._problem((*path, *inner), *problem)
        return found

    def _read(self, key: Key, value: Any, path: Path) -> Any:
        if key.value is not None:
            return self._value(key.value, value, path, key.default)
        if value is None and key.optional:
            return None
        table, kinds = key.tables[0], {}
        if key.several:
            if not isinstance(value, list | tuple):
                return self._problem(path, value, "an array of tables", f"[[{dotted(path)}]]")
            return tuple(self.table(table, each, (*path, i)) for i, each in enumerate(value))
        if len(key.tables) > 1 and isinstance(value, Mapping):
            kinds = {each.kind: each for each in key.tables}  # type: ignore[attr-defined]
            given = value.get("kind", dataclasses.MISSING)
            kind = self._value(one_of(*kinds), given, (*path, "kind"), next(iter(kinds)))
            if kind is None:
                return None
            table = kinds[kind]
        return self.table(table, value, path, kinds)

    def _value(self, value: Value, given: Any, path: Path, default: Any) -> Any:
        try:
            return value.check(given)
        except RuleBroken as error:
            if error.entry is not None:
                path, given = (*path, error.entry), given[error.entry]
            self._problem(path, given, error.rule, _instead(path, default, given, error.choices))


def _close(wrong: Any, names: Any) -> str | None:
    """The name that is most similar to a wrong name, or None."""
    return next(iter(difflib.get_close_matches(str(wrong), names, n=1, cutoff=0.75)), None)


def _instead(path: Path, default: Any, received: Any, choices: tuple[str, ...]) -> str:
    """A valid line to write: the closest choice, the number as an int, or the default."""
    close = _close(received, choices)
    key = path[-1]
    if isinstance(key, int):  # an entry of a list
        if received in choices:
            return "drop the second entry"
        return show_value(close) if close else "one of these" if choices else "a string in quotes"
    if key in _EXAMPLES:
        return _EXAMPLES[key]
    if isinstance(default, int) and isinstance(received, float) and received.is_integer():
        default = int(received)
    return f"{key} = {show_value(close or (NONE if default is None else default))}"


def written(table: Any) -> dict[str, Any]:
    """A table as plain mappings, lists, strings, bools and numbers.

    Omits absent tables; an absent limit is the string "none".
    """
    document = {"kind": table.kind} if hasattr(table, "kind") else {}
    for name, key in keys_of(type(table)).items():
        value = getattr(table, name)
        if is_table(value):
            document[name] = written(value)
        elif isinstance(value, tuple):
            document[name] = [written(each) if is_table(each) else each for each in value]
        elif value is not None:
            document[name] = value
        elif key.value is not None:
            document[name] = NONE
    return document


def rounded(value: Any, core: Any = None) -> Any:
    """The core's config of a table: floats are rounded to float32 once, for all backends.

    `core` is the config's class, or None for the class of the table.
    """
    if is_table(value):
        core = core or type(value)
        return core(*(rounded(getattr(value, name)) for name in core._fields))
    return to_float32(value) if isinstance(value, float) else value
