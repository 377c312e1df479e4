"""Loads and validates a policy from a name, a file, text or a mapping.

The policies of healcore are TOML files in `healcore.policies`.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import itertools
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from healcore import regular_file
from healcore.core.engine import Engine, EngineConfig
from healcore.core.ranges import NONE, RuleBroken
from healcore.policy.document import SCHEMA, Policy, to_dict
from healcore.policy.tables import (
    PolicyError,
    Problem,
    keys_of,
    most_similar,
    read_document,
    show_value,
)

PRESETS = ("default", "pretraining", "aggressive", "conservative", "observe", "zclip")
"""healcore's own policies; all others in `healcore.policies` are recipes, published settings."""

PolicySource = str | os.PathLike[str] | Policy
"""A name of a preset or recipe, a path of a TOML file, or a policy."""

PolicyLike = PolicySource | Engine | EngineConfig
"""A `PolicySource`, or an Engine or EngineConfig, whose numbers may be traced arrays."""

MAX_VARIANTS = 100
"""A larger table is not read, and the best of many settings is the best by chance."""

_MAX_FILE_BYTES = 1 << 20  # bytes; a policy has a few kB, so a larger file is no policy

_Table = Mapping[str, Any]


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
    clip: _Table | None
    detect: _Table
    respond: Sequence[_Table] | Mapping[int, _Table]
    incident: _Table
    rollback: _Table
    lr: _Table
    budget: _Table
    retry: _Table
    skip_batch: _Table
    hang: _Table


def load(policy: PolicySource, **overrides: Unpack[Overrides]) -> Policy:
    """Loads and validates a policy.

        policy = healcore.policy.load("default", clip={"max_norm": 1.0}, detect={"plateau": {}})
        healer = healcore.Healer(policy, state=state, store="run-1")

    Args:
        policy: the name of a preset or recipe, the path of a TOML file (it ends in .toml or
            contains a separator), or a `Policy`, which is returned unchanged.
        **overrides: values to replace before validation, see `Overrides`.

    Returns:
        The policy. It is frozen, so it may be shared and compared.

    Raises:
        PolicyError: the preset or file does not exist, is not TOML, or is not a valid policy.
    """
    if isinstance(policy, Policy) and not overrides:
        return policy
    data, source = _document_of(policy, overrides)
    if overrides:
        source = f"{source} with {', '.join(overrides)} given as keywords"
        _check_keywords(overrides, source)
    return from_dict(merged(data, overrides, source), source=source)


def _document_of(policy: PolicySource, overrides: _Table) -> tuple[dict[str, Any], str]:
    """The unvalidated document of a policy, and its name in error messages."""
    if isinstance(policy, Policy):
        return to_dict(policy), policy.name
    if isinstance(policy, str) and not _is_path(policy):
        return _parse(_text_of(policy), policy), policy
    if isinstance(policy, str | os.PathLike):
        source = os.fsdecode(policy)
        return _parse(_read(policy), source), source
    rule = "a preset's name, a path, or a Policy"
    if overrides:
        rule += f", to replace {', '.join(overrides)} by keyword"
    write = '"default", or from_dict(...) for a mapping'
    raise _error(type(policy).__name__, show_value(policy), rule, write, key="policy")


def _is_path(policy: str) -> bool:
    return policy.endswith(".toml") or "/" in policy or os.sep in policy


def _text_of(name: str) -> str:
    """The text of a preset or recipe; raises `PolicyError` with the most similar name."""
    known = (*PRESETS, *recipe_names())
    if name in known:
        return preset_text(name)
    write = f"for a file write {name}.toml"
    similar = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if similar:
        write = f"did you mean {similar[0]!r}? {write}"
    shown = show_value(name)
    raise _error(shown, shown, f"one of {', '.join(known)}", write, key="policy", unreadable=True)


def _check_keywords(overrides: _Table, source: str) -> None:
    """Raises `PolicyError` for a keyword that no policy has, or a value in place of a table."""
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
        raise _error(source, "", rule, write, key=name)


def check_spelling(overrides: _Table, function: Callable[..., Any]) -> None:
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
    kinds = [keys for table in declared.tables if (keys := keys_of(table))]
    inner = [key for key in kinds[0] if all(key in keys for keys in kinds)]
    key = f"{name}.{inner[0]}"
    write = f"{key}, as {_as_keyword(key)} in Python"
    rule = kinds[0][inner[0]].value
    if len(inner) == 1 and rule is not None:  # only one key can be meant
        with contextlib.suppress(RuleBroken):
            rule.check(value)
            shown = show_value(value)
            write = f"{key} = {shown}, as {_as_keyword(key, shown)} in Python"
    raise _error(source, show_value(value), "a table", write, key=name)


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


def loads(text: str, *, source: str = "<text>") -> Policy:
    """Loads and validates a policy from TOML text.

        policy = healcore.policy.loads('''
        schema = 1
        name = "mine"
        [detect.nonfinite]
        ''')

    Args:
        text: the document.
        source: name of the document in error messages.

    Returns:
        The policy.

    Raises:
        PolicyError: as `load`.
    """
    if not isinstance(text, str):
        raise _error(source, show_value(text), "TOML text, a str", "text.decode(), or load(path)")
    return from_dict(_parse(text, source), source=source)


def _parse(text: str, source: str) -> dict[str, Any]:
    """Parses TOML without validation."""
    try:
        return tomllib.loads(text)
    # ValueError includes TOMLDecodeError, impossible dates and numbers with too many digits. A
    # thousand nested brackets are a RecursionError.
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if isinstance(error, RecursionError):
            reason = "brackets nested too deeply"
        write = "correct the syntax at that place"
        raise _error(source, reason, "TOML (https://toml.io)", write) from error


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
        PolicyError: as `load`, with every problem of the document.
    """
    # Check the schema first: keys of another schema would give many misleading errors.
    schema = None
    if isinstance(data, Mapping):
        schema = data.get("schema")
    if isinstance(schema, int) and not isinstance(schema, bool) and schema != SCHEMA:
        rule = f"{SCHEMA}, the version of the file format that this release reads"
        write = "schema = 1, or upgrade healcore if a newer one wrote the file"
        raise _error(source, show_value(schema), rule, write, key="schema")
    policy, problems = read_document(data, Policy)
    if problems:
        raise PolicyError(source, problems)
    return policy


def _error(
    source: str, value: str, rule: str, write: str, *, key: str = "", unreadable: bool = False
) -> PolicyError:
    """Makes an error with one problem."""
    return PolicyError(source, (Problem(key, value, rule, write),), unreadable=unreadable)


def _read(path: str | os.PathLike[str]) -> str:
    """Reads the file's text; raises `PolicyError`."""
    try:
        return regular_file.read(Path(path), _MAX_FILE_BYTES).decode()
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 at byte {error.start}"
        rule = "a text file in UTF-8"
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = str(error)
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        rule = "a file that can be read"
    write = f"the path of a TOML file, or a preset: {', '.join(preset_names())}"
    raise _error(os.fsdecode(path), reason, rule, write, unreadable=True)


def resolve(policy: PolicyLike, overrides: Mapping[str, Any] = {}) -> Policy | Engine:
    """Loads a policy, or returns an Engine as it is.

    Args:
        policy: see `PolicyLike`.
        overrides: values to replace, as in `Overrides`; not allowed for an Engine or EngineConfig.

    Returns:
        The policy, or the Engine of an Engine or EngineConfig.

    Raises:
        PolicyError: the policy does not exist or is not valid.
    """
    if isinstance(policy, EngineConfig) and not overrides:
        return Engine(policy)
    if isinstance(policy, Engine) and not overrides:
        return policy
    # `load` raises for an Engine with overrides.
    return load(policy, **overrides)  # type: ignore[arg-type]


def engine_of(policy: PolicyLike, overrides: Mapping[str, Any] = {}) -> Engine:
    """Makes the engine of a policy.

        engine = healcore.policy.engine_of("default", {"clip": {"max_norm": 1.0}})
        state = engine.init()

    Args:
        policy: see `PolicyLike`.
        overrides: values to replace, as in `Overrides`; not allowed for an Engine or EngineConfig.

    Returns:
        The engine. An Engine is returned as it is.

    Raises:
        PolicyError: the policy does not exist or is not valid.
    """
    resolved = resolve(policy, overrides)
    if isinstance(resolved, Engine):
        return resolved
    return resolved.engine()


def preset_names() -> tuple[str, ...]:
    """Lists healcore's own policies.

        healcore.policy.preset_names()[0]  # 'default'

    Returns:
        The names, "default" first.
    """
    return PRESETS


def recipe_names() -> tuple[str, ...]:
    """Lists the published recipes that healcore includes.

        for name in healcore.policy.recipe_names():
            print(name, healcore.policy.load(name).description)

    Returns:
        The names, sorted.
    """
    names = []
    for entry in resources.files("healcore.policies").iterdir():
        file = Path(entry.name)
        if file.suffix == ".toml" and file.stem not in PRESETS:
            names.append(file.stem)
    return tuple(sorted(names))


def name_of(fingerprint: str | None) -> str | None:
    """Finds a preset or recipe by its fingerprint.

    Args:
        fingerprint: `Engine.fingerprint`, which is None for an engine of traced arrays.

    Returns:
        The name, or None if no policy of healcore has this fingerprint.
    """
    for name in (*preset_names(), *recipe_names()):
        if engine_of(name).fingerprint == fingerprint:
            return name
    return None


def preset_text(name: str) -> str:
    """Reads the TOML text of a preset or recipe, including comments.

        Path("mine.toml").write_text(healcore.policy.preset_text("pretraining"))

    Args:
        name: one of `preset_names()` or `recipe_names()`.

    Returns:
        The text, a good start for a policy of your own.

    Raises:
        KeyError: no policy has this name.
    """
    if name not in (*preset_names(), *recipe_names()):
        raise KeyError(name)
    return (resources.files("healcore.policies") / f"{name}.toml").read_text(encoding="utf-8")


def merged(data: _Table, overrides: _Table, source: str) -> dict[str, Any]:
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


def _merged_tables(old: _Table, changes: _Table) -> dict[str, Any]:
    """A copy of nested tables with values replaced. A key that is not named stays."""
    new = dict(old)
    for key, value in changes.items():
        if isinstance(value, Mapping):
            new[key] = _merged_tables(_as_table(new.get(key)), value)
        else:
            new[key] = value
    return new


def _as_table(value: object) -> _Table:
    """The value if it is a table, or an empty table. Validation reports any other value."""
    if isinstance(value, Mapping):
        return value
    return {}


def _merged_clip(old: _Table, changes: _Table) -> dict[str, Any]:
    """The table `clip` with values replaced.

    A new `kind` drops the old keys, because the keys of one kind of clipping do not fit another. In
    a policy without clipping a `max_norm` alone means the kind "fixed".
    """
    kind = old.get("kind")
    if kind == "none" and changes and "kind" not in changes:
        if dict(changes) == {"max_norm": None}:
            return dict(old)  # no clipping has no limit either
        return {"kind": "fixed", **changes}
    if changes.get("kind", kind) != kind:
        return _merged_tables({}, changes)
    return _merged_tables(old, changes)


def _merged_rules(
    rules: Sequence[_Table], changes: Mapping[int, _Table], source: str
) -> list[_Table]:
    """The rules of `respond` with the values of some rules, by number, replaced."""
    new = list(rules)
    for number, change in changes.items():
        if not (isinstance(number, int) and 0 <= number < len(new)):
            numbers = f"0 to {len(new) - 1}" if new else "none"
            rule = f"the number of a rule of this policy, which has {numbers}"
            write = "respond[0], or respond with all rules"
            raise _error(source, "", rule, write, key=f"respond[{number}]")
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
            raise _error("on the command line", pair, rule, write, key=option)
        overrides = _merged_tables(overrides, table)
    return overrides


def _parse_pair(pair: str) -> dict[str, Any] | None:
    """The nested tables with the one value of a `KEY=VALUE` pair, or None if it is no pair."""
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


def variants(policy: Policy, vary: Sequence[str]) -> dict[str, Policy]:
    """Makes all combinations of the values of some keys.

    Args:
        policy: the base policy.
        vary: options `KEY=A,B,C` with the dotted keys of a policy file. A comma within brackets
            does not separate values.

    Returns:
        The base policy by its name, then each variant by its settings, such as
        "clip.max_norm=0.5 mode=observe". The last option varies fastest.

    Raises:
        PolicyError: an option has another form, a value is invalid, or there are more than
            `MAX_VARIANTS` variants.
    """
    axes: list[list[str]] = []
    for option in vary:
        key, _, values = option.partition("=")
        settings = [f"{key.strip()}={value}" for value in _split_values(values)]
        axes.append(list(dict.fromkeys(settings)))  # without a value that is given twice
    count = math.prod(map(len, axes))
    if count > MAX_VARIANTS:
        rule = f"at most {MAX_VARIANTS} variants"
        raise _error("on the command line", f"{count:,} variants", rule, "fewer values of --vary")
    policies = {policy.name: policy}
    for settings in itertools.product(*axes):
        policies[" ".join(settings)] = load(policy, **parse_overrides(settings, "--vary"))
    return policies


def _split_values(text: str) -> list[str]:
    """Splits values at commas outside of brackets: `["skip"],["skip", "alert"]` has two values."""
    values = [""]
    depth = 0
    for character in text:
        if character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        if character == "," and depth == 0:
            values.append("")
        else:
            values[-1] += character
    return [value.strip() for value in values]


# -- a trainer's own gradient clipping -------------------------------------------------------------

# A trainer clips before the policy measures the norm, so a spike of 700 would be judged as 1.0.
_WITH_LIMIT = ("zclip", "fixed", "autoclip")
"""Kinds of clipping whose `max_norm` applies at every step."""


def can_apply_limit(policy: Policy | Engine) -> bool:
    """Whether the policy's clipping can apply a fixed limit at every step.

    Args:
        policy: the policy or Engine of a trainer's run.

    Returns:
        False if the trainer has to clip, after the policy has measured: without clipping, where the
        trainer's own clip gives the same bits as without healcore; in observe mode; with AdaGC,
        whose limit ends with its warm-up; and for an Engine, whose numbers may be traced arrays.
    """
    return isinstance(policy, Policy) and policy.mode == "heal" and policy.clip.kind in _WITH_LIMIT


def with_limit(policy: Policy | Engine, limit: float | None) -> Policy | Engine:
    """Gives a trainer's limit to the policy's clipping, unless the policy's own limit is lower.

    Args:
        policy: the policy or Engine of a trainer's run.
        limit: largest gradient norm of the trainer, or None for no limit.

    Returns:
        The policy with the limit as `max_norm`. In a policy without clipping this limit alone
        clips. The policy is unchanged if `limit` is None, for an Engine, in observe mode and with
        AdaGC.
    """
    if limit is None or not isinstance(policy, Policy) or policy.mode != "heal":
        return policy
    if policy.clip.kind not in ("none", *_WITH_LIMIT):
        return policy
    own = to_dict(policy)["clip"].get("max_norm")
    if isinstance(own, int | float) and own <= limit:
        return policy
    return load(policy, clip={"max_norm": float(limit)})
