"""Replaces values of a policy's document: the keywords of `load`, and `KEY=VALUE` of a command.

The functions work on nested mappings before validation. `loader.from_dict` validates the result.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from healcore.core.ranges import NONE, RuleBroken
from healcore.policy.document import Policy
from healcore.policy.tables import Key, keys_of, most_similar, policy_error, show_value

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


def check_keywords(overrides: Table, source: str) -> None:
    """Checks the names of keywords, and that a table is given where a policy has a table.

    Args:
        overrides: the keywords of `load`.
        source: name of the document in error messages.

    Raises:
        PolicyError: no policy has such a keyword, or its value is not a table, as in `clip=1.0`.
    """
    keys = Overrides.__annotations__
    for name, value in overrides.items():
        if name in keys:
            _check_table(name, value, source)
            continue
        rule = "an option of the function that you call, or a key of a policy"
        write = f"the option as the function has it, or one of {', '.join(keys)}"
        candidates = _keys_with_table(name)
        similar = most_similar(name, list(keys))
        if similar and not candidates:
            write = f"did you mean {similar!r}?"
        if candidates:
            write = f"{' or '.join(candidates)}, as {_as_keyword(candidates[0])} in Python"
        raise policy_error(source, "", rule, write, key=name)


def check_spelling(overrides: Table, function: Callable[..., Any]) -> None:
    """Raises TypeError for a keyword that is a misspelled argument of a function.

    A function with `**overrides` receives a misspelled argument among them.

    Args:
        overrides: the keywords that are not arguments of the function.
        function: the function, or a class for its constructor.

    Raises:
        TypeError: a keyword is no key of a policy, and resembles an argument more than any key.
    """
    keys = list(Overrides.__annotations__)
    arguments: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind != parameter.VAR_KEYWORD:
            arguments.append(name)
    for name in overrides:
        if name in keys or _keys_with_table(name):
            continue
        similar = most_similar(name, [*keys, *arguments])
        if similar in arguments:
            raise TypeError(
                f"{name} is neither an argument of {function.__name__} nor a key of a policy: "
                f"did you mean {similar}?"
            )


def _check_table(name: str, value: Any, source: str) -> None:
    """Raises `PolicyError` for another value in place of a table, as in `clip=1.0`."""
    declared = keys_of(Policy)[name]
    if not declared.tables or declared.several or isinstance(value, Mapping):
        return
    if name == "clip" and (value is None or value == NONE):
        return
    common = _common_keys(declared.tables)
    meant = next(iter(common))
    key = f"{name}.{meant}"
    write = f"{key}, as {_as_keyword(key)} in Python"
    rule = common[meant].value
    if len(common) == 1 and rule is not None:  # only one key can be meant
        with contextlib.suppress(RuleBroken):
            rule.check(value)
            shown = show_value(value)
            write = f"{key} = {shown}, as {_as_keyword(key, shown)} in Python"
    raise policy_error(source, show_value(value), "a table", write, key=name)


def _common_keys(tables: Sequence[type]) -> dict[str, Key]:
    """The keys that all of these tables have, in the order of the first table.

    A table without keys, such as `NoClip`, does not count.
    """
    first, *others = [keys_of(table) for table in tables if keys_of(table)]
    common = dict(first)
    for keys in others:
        for name in first:
            if name not in keys:
                common.pop(name, None)
    return common


def _keys_with_table(name: str) -> list[str]:
    """The dotted keys that a name without a table may mean, as `zclip_z_threshold`."""
    candidates: list[str] = []
    for table, key in keys_of(Policy).items():
        if key.several:
            continue
        for table_class in key.tables:
            kind = getattr(table_class, "kind", table)
            for inner in keys_of(table_class):
                if name in (inner, f"{table}_{inner}", f"{kind}_{inner}"):
                    candidates.append(f"{table}.{inner}")
    return list(dict.fromkeys(candidates))  # two kinds of clipping may have the same key


def _as_keyword(key: str, value: str = "...") -> str:
    """Writes a dotted key as a keyword of `load`."""
    table, _, name = key.partition(".")
    return f'{table}={{"{name}": {value}}}'


def merged(data: Table, overrides: Table, source: str) -> dict[str, Any]:
    """Replaces values of a document.

    Tables are merged key by key; any other value replaces the old value. Three keys have rules of
    their own, so that the obvious keyword does the obvious thing: `detect` (None turns a detector
    off), `clip` (a new kind starts from its defaults), and `respond` (a mapping changes some rules
    by their number). The text "none" for a table means None, because TOML, and so the command line,
    has no None.

    Args:
        data: the document, which is not changed.
        overrides: the values, as in `Overrides`.
        source: name of the document in error messages.

    Returns:
        The new document, which `from_dict` has to validate.

    Raises:
        PolicyError: the policy has no rule with a given number.
    """
    new = dict(data)
    for key, value in overrides.items():
        old = new.get(key)
        if key == "detect" and isinstance(value, Mapping):
            tables = {name: None if table == NONE else table for name, table in value.items()}
            new[key] = _merged_tables(_as_table(old), tables)
        elif key == "clip" and (value is None or value == NONE):
            new[key] = {"kind": "none"}
        elif key == "clip" and isinstance(value, Mapping):
            new[key] = _merged_clip({"kind": "none", **_as_table(old)}, value)
        elif key == "respond" and isinstance(value, Mapping):
            rules = old if isinstance(old, list | tuple) else []
            new[key] = _merged_rules(rules, value, source)
        else:
            new = _merged_tables(new, {key: value})
    return new


def _merged_tables(old: Table, changes: Table) -> dict[str, Any]:
    """A copy of nested tables with values replaced. A key that is not named stays."""
    new = dict(old)
    for key, value in changes.items():
        if isinstance(value, Mapping):
            new[key] = _merged_tables(_as_table(new.get(key)), value)
        else:
            new[key] = value
    return new


def _as_table(value: object) -> Table:
    """The value if it is a table, or an empty table. Validation reports any other value."""
    if isinstance(value, Mapping):
        return value
    return {}


def _merged_clip(old: Table, changes: Table) -> dict[str, Any]:
    """The table `clip` with values replaced.

    A new `kind` drops the old keys, because the keys of one kind of clipping do not fit another. In
    a policy without clipping a `max_norm` alone means the kind "fixed".
    """
    kind = old.get("kind")
    if kind == "none" and changes and "kind" not in changes:
        if dict(changes) == {"max_norm": None}:
            # A policy without clipping has no limit: nothing changes.
            return dict(old)
        return {"kind": "fixed", **changes}
    if changes.get("kind", kind) != kind:
        return _merged_tables({}, changes)
    return _merged_tables(old, changes)


def _merged_rules(rules: Sequence[Table], changes: Mapping[int, Table], source: str) -> list[Table]:
    """The rules of `respond` with the values of some rules, by number, replaced."""
    new = list(rules)
    for number, change in changes.items():
        if not (isinstance(number, int) and 0 <= number < len(new)):
            numbers = f"0 to {len(new) - 1}" if new else "none"
            rule = f"the number of a rule of this policy, which has {numbers}"
            write = "respond[0], or respond with all rules"
            raise policy_error(source, "", rule, write, key=f"respond[{number}]")
        new[number] = _merged_tables(new[number], change)
    return new


_RULE_KEY = re.compile(r"\s*respond\[(\d+)\]\.(.+)")


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
        table = _parse_pair(pair)
        if table is None:
            rule = "must be KEY=VALUE with a dotted key"
            write = f"{option} clip.max_norm=1.0, {option} mode=observe"
            raise policy_error("on the command line", pair, rule, write, key=option)
        overrides = _merged_tables(overrides, table)
    return overrides


def _parse_pair(pair: str) -> dict[str, Any] | None:
    """The nested tables with the value of a `KEY=VALUE` pair, or None if the text is not a pair."""
    key, _, value = pair.partition("=")
    if not value:
        return None
    rule_key = _RULE_KEY.fullmatch(key)
    if rule_key is not None:
        key = rule_key[2]
    # First as TOML, then as a string to which the user gave no quotes.
    for toml_value in (value, json.dumps(value.strip())):
        try:
            table: dict[str, Any] = tomllib.loads(f"{key} = {toml_value}")
            if table and rule_key is not None:
                table = {"respond": {int(rule_key[1]): table}}
        except ValueError:
            continue
        if table:
            return table
    return None
