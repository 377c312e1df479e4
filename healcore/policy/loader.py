"""Loads and validates a policy from a name, a file, text or a mapping.

The policies of healcore are TOML files in `healcore.policies`.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from healcore import regular_file
from healcore.core.engine import Engine, EngineConfig
from healcore.core.ranges import NONE
from healcore.policy.document import SCHEMA, Policy, to_dict
from healcore.policy.tables import PolicyError, Problem, keys_of, read_document, show_value

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

        load("default", clip={"max_norm": 1.0}, detect={"plateau": {}})

    Args:
        policy: the name of a preset or recipe, the path of a TOML file (it ends in .toml or
            contains a separator), or a `Policy`, which is returned unchanged.
        **overrides: values to replace before validation, see `Overrides`.

    Raises:
        PolicyError: the preset or file does not exist, is not TOML, or is not a valid policy.
    """
    if isinstance(policy, Policy):
        if not overrides:
            return policy
        data, source = to_dict(policy), policy.name
    elif isinstance(policy, str) and not (
        policy.endswith(".toml") or "/" in policy or os.sep in policy
    ):
        known = (*PRESETS, *recipe_names())
        if policy not in known:
            close = difflib.get_close_matches(policy, known, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]!r}? " if close else ""
            rule, write = f"one of {', '.join(known)}", f"{hint}for a file write {policy}.toml"
            shown = show_value(policy)
            raise _error(shown, shown, rule, write, key="policy", unreadable=True)
        data, source = _parse(preset_text(policy), policy), policy
    elif isinstance(policy, str | os.PathLike):
        source = os.fsdecode(policy)
        data = _parse(_read(policy), source)
    else:
        rule = "a preset's name, a path, or a Policy"
        if overrides:
            rule += f", to replace {', '.join(overrides)} by keyword"
        write = '"default", or from_dict(...) for a mapping'
        raise _error(type(policy).__name__, show_value(policy), rule, write, key="policy")
    if overrides:
        source = f"{source} with {', '.join(overrides)} given as keywords"
    keys = Overrides.__annotations__
    for name in (name for name in overrides if name not in keys):
        rule = "an option of the function that you call, or a key of a policy"
        write = f"the option as the function has it, or one of {', '.join(keys)}"
        if meant := _keys_with_table(name):
            write = f"{' or '.join(meant)}, as {_as_keyword(meant[0])} in Python"
        raise _error(source, "", rule, write, key=name)
    return from_dict(merged(data, overrides, source), source=source)


def _keys_with_table(name: str) -> list[str]:
    """The dotted keys that a name without a table may mean, as `zclip_z_threshold`."""
    found = []
    for table, key in keys_of(Policy).items():
        for kind in key.tables if not key.several else ():
            for inner in keys_of(kind):
                names = (inner, f"{table}_{inner}", f"{getattr(kind, 'kind', table)}_{inner}")
                found += [f"{table}.{inner}"] if name in names else []
    return list(dict.fromkeys(found))


def _as_keyword(key: str) -> str:
    """Writes a dotted key as a keyword of `load`."""
    table, _, name = key.partition(".")
    return f'{table}={{"{name}": ...}}'


def loads(text: str, *, source: str = "<text>") -> Policy:
    """Loads a policy from TOML text.

    Args:
        text: the document.
        source: name of the document in error messages.

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
        reason = "brackets nested too deeply" if isinstance(error, RecursionError) else str(error)
        write = "correct the syntax at that place"
        raise _error(source, reason, "TOML (https://toml.io)", write) from error


def from_dict(data: Mapping[str, Any], *, source: str = "<dict>") -> Policy:
    """Validates a policy given as nested mappings and lists, as `to_dict` writes it.

    Args:
        data: the document.
        source: name of the document in error messages.

    Raises:
        PolicyError: as `load`.
    """
    # Check the schema first: keys of another schema would give many misleading errors.
    schema = data.get("schema") if isinstance(data, Mapping) else None
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
        reason, rule = f"not UTF-8 at byte {error.start}", "a text file in UTF-8"
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        rule = "a file that can be read"
    write = f"the path of a TOML file, or a preset: {', '.join(preset_names())}"
    raise _error(os.fsdecode(path), reason, rule, write, unreadable=True)


def resolve(policy: PolicyLike, overrides: Mapping[str, Any] = {}) -> Policy | Engine:
    """Loads the policy, or returns the Engine as it is; raises `PolicyError`."""
    if isinstance(policy, EngineConfig) and not overrides:
        return Engine(policy)
    if isinstance(policy, Engine) and not overrides:
        return policy
    # `load` raises for an Engine with overrides.
    return load(policy, **overrides)  # type: ignore[arg-type]


def engine_of(policy: PolicyLike, overrides: Mapping[str, Any] = {}) -> Engine:
    """The engine of a policy.

    Args:
        policy: see `PolicyLike`.
        overrides: values to replace, as in `Overrides`; not allowed for an Engine or EngineConfig.

    Raises:
        PolicyError: the policy does not exist or is not valid.
    """
    resolved = resolve(policy, overrides)
    return resolved if isinstance(resolved, Engine) else resolved.engine()


def preset_names() -> tuple[str, ...]:
    """Names of healcore's own policies, "default" first."""
    return PRESETS


def recipe_names() -> tuple[str, ...]:
    """Names of the published recipes that healcore includes, sorted."""
    files = [Path(entry.name) for entry in resources.files("healcore.policies").iterdir()]
    names = {file.stem for file in files if file.suffix == ".toml"}
    return tuple(sorted(names.difference(PRESETS)))


def name_of(fingerprint: str | None) -> str | None:
    """The name of the preset or recipe with this fingerprint, or None."""
    names = (*preset_names(), *recipe_names())
    return next((name for name in names if engine_of(name).fingerprint == fingerprint), None)


def preset_text(name: str) -> str:
    """The TOML text of a preset or recipe, including comments.

    Args:
        name: one of `preset_names()` or `recipe_names()`.

    Raises:
        KeyError: no policy has this name.
    """
    if name not in (*preset_names(), *recipe_names()):
        raise KeyError(name)
    return (resources.files("healcore.policies") / f"{name}.toml").read_text(encoding="utf-8")


def merged(data: _Table, overrides: _Table, source: str) -> dict[str, Any]:
    """A copy of a document with values replaced. `from_dict` validates the result.

    The text "none" for a table means None, because TOML, and so the command line, has no None.
    Raises PolicyError if the policy has no rule with a given number.
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
        is_table = isinstance(value, Mapping)
        new[key] = _merged_tables(_as_table(new.get(key)), value) if is_table else value
    return new


def _as_table(value: Any) -> _Table:
    """The value if it is a table, or an empty table. Validation reports any other value."""
    return value if isinstance(value, Mapping) else {}


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
    return _merged_tables(old if changes.get("kind", kind) == kind else {}, changes)


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
    of the policy, whose kind of clipping decides which keys exist. Raises PolicyError.
    """
    overrides: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        rule_key = _RULE_KEY.fullmatch(key)
        name = rule_key[2] if rule_key else key
        for text in (f"{name} = {value}", f"{name} = {json.dumps(value.strip())}"):
            with contextlib.suppress(ValueError):
                if table := tomllib.loads(text if value else ""):
                    table = {"respond": {int(rule_key[1]): table}} if rule_key else table
                    overrides = _merged_tables(overrides, table)
                    break
        else:
            rule = "must be KEY=VALUE with a dotted key"
            write = f"{option} clip.max_norm=1.0, {option} mode=observe"
            raise _error("on the command line", pair, rule, write, key=option)
    return overrides


def variants(policy: Policy, vary: Sequence[str]) -> dict[str, Policy]:
    """The base policy by its name, and all combinations of the values by their settings.

    `vary` has options `KEY=A,B,C` with the dotted keys of a policy file. Raises PolicyError if an
    option has another form, a value is invalid, or there are more than `MAX_VARIANTS`.
    """
    axes: list[list[str]] = []
    for text in vary:
        key, _, values = text.partition("=")
        settings = [f"{key.strip()}={value}" for value in _split_values(values)]
        axes.append(list(dict.fromkeys(settings)))
    count = math.prod(map(len, axes))
    if count > MAX_VARIANTS:
        rule = f"at most {MAX_VARIANTS} variants"
        raise _error("on the command line", f"{count:,} variants", rule, "fewer values of --vary")
    found = {policy.name: policy}
    for settings in itertools.product(*axes):
        found[" ".join(settings)] = load(policy, **parse_overrides(settings, "--vary"))
    return found


def _split_values(text: str) -> list[str]:
    """Splits values at commas outside of brackets: `["skip"],["skip", "alert"]` has two values."""
    values = [""]
    depth = 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
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

    False without clipping, where the trainer's own clip gives the same bits as without healcore; in
    observe mode; and with AdaGC, whose limit ends with its warm-up. Also False for an Engine, whose
    numbers may be traced arrays. The trainer then clips, after the policy has measured.
    """
    return isinstance(policy, Policy) and policy.mode == "heal" and policy.clip.kind in _WITH_LIMIT


def with_limit(policy: Policy | Engine, limit: float | None) -> Policy | Engine:
    """The policy with a trainer's limit as `max_norm`, unless its own limit is lower.

    In a policy without clipping this limit alone clips. The policy is unchanged if `limit` is None,
    for an Engine, in observe mode and with AdaGC.
    """
    if limit is None or not isinstance(policy, Policy) or policy.mode != "heal":
        return policy
    if policy.clip.kind not in ("none", *_WITH_LIMIT):
        return policy
    own = to_dict(policy)["clip"].get("max_norm")
    if isinstance(own, int | float) and own <= limit:
        return policy
    return load(policy, clip={"max_norm": float(limit)})
