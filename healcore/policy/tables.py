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
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, get_args, get_type_hints

from healcore.core.errors import HealcoreError
from healcore.core.ranges import NONE, RuleBroken, ValueRule, one_of, to_float32

Conflict = tuple[tuple[str | int, ...], Any, str, str]
"""Values of a table that exclude each other: the path from the table to the named value, this
value, the rule that it violates, and what to write instead."""

_MAX_SHOWN = 60
"""Limit of the characters of a received value."""


# -- values that only a policy has -------------------------------------------------------------


def text(*, empty: bool = True) -> ValueRule:
    """A string."""
    rule = "a string" if empty else "a non-empty string on one line"

    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise RuleBroken(rule)
        if not empty and (not value.strip() or len(value.splitlines()) != 1):
            raise RuleBroken(rule)
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RuleBroken(f"{rule}, that UTF-8 can encode") from error
        return value

    return ValueRule(rule, check)


def listed(kind: ValueRule, *, empty: bool = False) -> ValueRule:
    """Declares a list without duplicates.

    Args:
        kind: the declaration of each entry, such as `one_of(...)`.
        empty: whether the empty list is accepted.

    Returns:
        The declaration. Its check returns a tuple.
    """
    rule = f"{'a list' if empty else 'a non-empty list'}, each entry {kind.rule}"

    def check(value: Any) -> tuple[str, ...]:
        if not isinstance(value, list | tuple) or not (value or empty):
            raise RuleBroken(rule)
        for i, entry in enumerate(value):
            try:
                kind.check(entry)
            except RuleBroken as error:
                raise RuleBroken(error.rule, error.choices, i) from error
            if entry in value[:i]:
                raise RuleBroken("in the list once; this is a repetition", tuple(value[:i]), i)
        return tuple(value)

    return ValueRule(rule, check)


# -- problems ----------------------------------------------------------------------------------


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
        lines = []
        if self.key and self.value:
            lines.append(f"{self.key} = {self.value}")
        elif self.key or self.value:
            lines.append(self.key or self.value)
        lines += [f"  rule:  {self.rule}", f"  write: {self.write}"]
        return "\n".join(lines)


class PolicyError(HealcoreError, ValueError):
    """An invalid policy. Raised when the policy is loaded, never during a run.

    The message lists every problem of the policy, so that one correction of the file is enough.

    Attributes:
        source: the file, the preset's name, or "<text>".
        problems: in the order of the documented keys.
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
        if isinstance(value, bool):
            text = str(value).lower()
        elif isinstance(value, str):
            text = json.dumps(value, ensure_ascii=False)
        else:
            text = repr(value)
    except (ValueError, RecursionError):  # a huge int, or a cycle
        return f"a {type(value).__name__} too long to print"
    if len(text) > _MAX_SHOWN:
        return f"{text[: _MAX_SHOWN - 3]}..."
    return text


def dotted(parts: tuple[str | int, ...]) -> str:
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
    """The declaration of one key, from the annotation and the default of a field.

    The annotation decides what the key has in a file:

        Annotated[int, whole(1, 9)]      a value, checked by `whole(1, 9)`
        LrConfig                         a table
        LrConfig | None                  a table, or nothing (`optional`)
        ZClipConfig | FixedConfig        one of several tables; its key `kind` says which
        tuple[Respond, ...]              a list of tables (`several`)

    Attributes:
        default: the default, or `dataclasses.MISSING` for a required key.
        value: rule of a value, or None for a table.
        tables: class of the table or of the tables in a list, or one class for each `kind`.
        optional: whether the table may be absent.
        several: whether the key has a list of tables.
    """

    default: Any
    value: ValueRule | None
    tables: tuple[type, ...]
    optional: bool
    several: bool


def is_table(kind: object) -> bool:
    """Whether a class, or the class of an object, declares a table."""
    return hasattr(kind, "_fields") or dataclasses.is_dataclass(kind)


@functools.cache
def keys_of(table: type) -> dict[str, Key]:
    """Reads the declarations of the keys of a table.

    Args:
        table: a NamedTuple or a dataclass with annotated fields.

    Returns:
        Name of the key -> its declaration, in the order of the fields.
    """
    defaults: dict[str, Any] = {}
    if dataclasses.is_dataclass(table):
        for field in dataclasses.fields(table):
            defaults[field.name] = field.default
    else:
        field_defaults = table._field_defaults  # type: ignore[attr-defined]
        for name in table._fields:  # type: ignore[attr-defined]
            defaults[name] = field_defaults.get(name)
    hints = get_type_hints(table, include_extras=True)
    keys = {}
    for name, default in defaults.items():
        hint = hints[name]
        (value,) = getattr(hint, "__metadata__", (None,))
        parts = (hint, *get_args(hint))
        tables = tuple(part for part in parts if isinstance(part, type) and is_table(part))
        keys[name] = Key(
            default, value, tables, optional=type(None) in parts, several=Ellipsis in parts
        )
    return keys


def read_document(data: Any, root: type) -> tuple[Any, tuple[Problem, ...]]:
    """Reads a document by the declarations of its tables.

    Args:
        data: the document, as `tomllib` parses it. Any other value is a problem.
        root: class of the table at the top, `Policy`.

    Returns:
        The object of class `root` and no problems, or None and every problem of the document.
    """
    reader = _Reader()
    table = reader.table(root, data, ())
    return table, tuple(reader.problems)


class _Reader:
    """Reads a document and collects its problems; a value with a problem becomes None."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def _add_problem(self, path: Path, value: object, rule: str, write: str) -> None:
        shown = ""
        if value is not dataclasses.MISSING:
            shown = show_value(value)
        self.problems.append(Problem(dotted(path), shown, rule, write))

    def table(self, table: type, data: Any, path: Path, kinds: Mapping[str, type] = {}) -> Any:
        """Reads a table of one class.

        Args:
            table: class of the table.
            data: content of the table in the document.
            path: keys from the top of the document to the table.
            kinds: all classes of a table with a kind, by the name of the kind.

        Returns:
            An object of the class, or None if the table has a problem.
        """
        if not isinstance(data, Mapping):
            self._add_problem(path or ("policy",), data, "a table", _table_header(path))
            return None
        problems_before = len(self.problems)
        values = {}
        for name, key in keys_of(table).items():
            if name in data:
                values[name] = self._read(key, data[name], (*path, name))
            elif key.default is dataclasses.MISSING:
                write = _EXAMPLES[name]
                self._add_problem((*path, name), key.default, "required, and missing", write)
        self._check_names(table, data, path, kinds)
        if len(self.problems) > problems_before:
            return None
        # Only a table of valid values can be compared with itself.
        result = table(**values)
        self._check_limits(result, path)
        if hasattr(result, "conflicts"):
            for inner_path, value, rule, write in result.conflicts():
                self._add_problem((*path, *inner_path), value, rule, write)
        return result

    def _check_names(
        self, table: type, data: Mapping[str, Any], path: Path, kinds: Mapping[str, type]
    ) -> None:
        """Finds keys that the table does not have, such as a wrong spelling."""
        known = list(keys_of(table))
        if hasattr(table, "kind"):
            known.insert(0, "kind")
        for name in data:
            if name in known:
                continue
            rule = "a key of this table"
            write = f"one of {', '.join(known)}"
            similar = most_similar(name, known)
            if kinds:
                rule += f', [{dotted(path)}] with kind = "{table.kind}"'  # type: ignore[attr-defined]
                others = [f'"{kind}"' for kind, other in kinds.items() if name in keys_of(other)]
                if others:
                    write += f"; kind = {' or '.join(others)} has {name}"
                    similar = None
            if similar:
                write = f"did you mean {similar!r}?"
            self._add_problem((*path, str(name)), data[name], rule, write)

    def _check_limits(self, table: Any, path: Path) -> None:
        """Finds values that are larger than the value of another key (`AT_MOST`)."""
        for name, limit in getattr(table, "AT_MOST", ()):
            value = getattr(table, name)
            largest = attrgetter(limit)(table)
            if value > largest:
                write = f"{name} = {largest}, or a larger {limit}"
                self._add_problem(
                    (*path, name), value, f"at most {limit}, which is {largest}", write
                )

    def _read(self, key: Key, value: Any, path: Path) -> Any:
        """Reads a value, a table or a list of tables."""
        if key.value is not None:
            return self._value(key.value, value, path, key.default)
        if value is None and key.optional:
            return None
        first_table = key.tables[0]
        if key.several:
            return self._list(first_table, value, path)
        if len(key.tables) > 1 and isinstance(value, Mapping):
            return self._table_with_kind(key.tables, value, path)
        return self.table(first_table, value, path)

    def _list(self, table: type, value: object, path: Path) -> tuple[Any, ...] | None:
        if not isinstance(value, list | tuple):
            self._add_problem(path, value, "an array of tables", f"[[{dotted(path)}]]")
            return None
        return tuple(self.table(table, entry, (*path, i)) for i, entry in enumerate(value))

    def _table_with_kind(
        self, tables: tuple[type, ...], value: Mapping[str, Any], path: Path
    ) -> Any:
        kinds: dict[str, type] = {table.kind: table for table in tables}  # type: ignore[attr-defined]
        default = next(iter(kinds))
        received = value.get("kind", dataclasses.MISSING)
        kind = self._value(one_of(*kinds), received, (*path, "kind"), default)
        if kind is None:
            return None
        return self.table(kinds[kind], value, path, kinds)

    def _value(self, declared: ValueRule, received: Any, path: Path, default: Any) -> Any:
        """Checks a value. Returns the value, or None if it has a problem."""
        try:
            return declared.check(received)
        except RuleBroken as error:
            if error.entry is not None:  # the wrong entry of a list
                path = (*path, error.entry)
                received = received[error.entry]
            write = _what_to_write(path, default, received, error.choices)
            self._add_problem(path, received, error.rule, write)
            return None


def _table_header(path: Path) -> str:
    """How a table begins in TOML."""
    if not path:
        return "key = value"
    if path[0] == "respond" and len(path) == 2:  # a rule, whose path ends with its number
        return "[[respond]]"
    return f"[{dotted(path)}]"


def most_similar(wrong: object, names: Sequence[str]) -> str | None:
    """Finds the name that a wrong name may mean.

    Args:
        wrong: the name as it was given.
        names: the names that exist.

    Returns:
        The most similar name, or None if none is similar.
    """
    similar = difflib.get_close_matches(str(wrong), names, n=1, cutoff=0.75)
    if not similar:
        return None
    return similar[0]


def _what_to_write(path: Path, default: object, received: object, choices: tuple[str, ...]) -> str:
    """A valid line to write: the closest choice, the number as an int, or the default."""
    similar = most_similar(received, choices)
    key = path[-1]
    if isinstance(key, int):  # an entry of a list
        if received in choices:
            return "drop the second entry"
        if similar:
            return show_value(similar)
        return "one of these" if choices else "a string in quotes"
    if key in _EXAMPLES:
        return _EXAMPLES[key]
    proposed = default
    if isinstance(default, int) and isinstance(received, float) and received.is_integer():
        proposed = int(received)
    if proposed is None:
        proposed = NONE
    return f"{key} = {show_value(similar or proposed)}"


def written(table: Any) -> dict[str, Any]:
    """Writes a table as plain mappings, lists, strings, bools and numbers.

    Args:
        table: an object that `read_document` returned, or one of its tables.

    Returns:
        The document, with defaults. Omits absent tables; an absent limit is the string "none".
    """
    document: dict[str, Any] = {}
    if hasattr(table, "kind"):
        document["kind"] = table.kind
    for name, key in keys_of(type(table)).items():
        value = getattr(table, name)
        if is_table(value):
            document[name] = written(value)
        elif isinstance(value, tuple) and key.several:
            document[name] = [written(entry) for entry in value]
        elif isinstance(value, tuple):
            document[name] = list(value)
        elif value is not None:
            document[name] = value
        elif key.value is not None:
            document[name] = NONE
    return document


def rounded(value: Any, core: Any = None) -> Any:
    """Makes the core's config of a table.

    Floats are rounded to float32 here, once for all backends. Otherwise JAX would round them in the
    jitted step and NumPy would not, and the backends could decide differently.

    Args:
        value: a table, or a value of it.
        core: class of the config, whose fields the table has too. None for the class of the table,
            if the core uses the table itself.

    Returns:
        The config, or the rounded value.
    """
    if is_table(value):
        core = core or type(value)
        return core(*(rounded(getattr(value, name)) for name in core._fields))
    if isinstance(value, float):
        return to_float32(value)
    return value
