"""Loads and validates a policy from a name, a file, text or a mapping.

The policies of healcore are TOML files in `healcore.policies`. Values that a user replaces by
keywords are merged into the document before it is validated (`overrides`).
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Unpack

from healcore import regular_file
from healcore.core.engine import Engine, EngineConfig
from healcore.policy.document import SCHEMA, Policy, to_dict
from healcore.policy.overrides import Overrides, Table, check_keywords, merged
from healcore.policy.tables import PolicyError, policy_error, read_document, show_value

PRESETS = ("default", "pretraining", "aggressive", "conservative", "observe", "zclip")
"""healcore's own policies; all others in `healcore.policies` are recipes, published settings."""

PolicySource = str | os.PathLike[str] | Policy
"""A name of a preset or recipe, a path of a TOML file, or a policy."""

PolicyLike = PolicySource | Engine | EngineConfig
"""A `PolicySource`, or an Engine or EngineConfig, whose numbers may be traced arrays."""

_MAX_FILE_BYTES = 1 << 20  # bytes; a policy has a few kB, so a larger file is no policy


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
        check_keywords(overrides, source)
    return from_dict(merged(data, overrides, source), source=source)


def _document_of(policy: PolicySource, overrides: Table) -> tuple[dict[str, Any], str]:
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
    raise policy_error(type(policy).__name__, show_value(policy), rule, write, key="policy")


def _is_path(policy: str) -> bool:
    return policy.endswith(".toml") or "/" in policy or os.sep in policy


def _text_of(name: str) -> str:
    """The text of a preset or recipe; raises `PolicyError` with the most similar name."""
    known = (*PRESETS, *recipe_names())
    if name in known:
        return preset_text(name)
    rule = f"one of {', '.join(known)}"
    write = f"for a file write {name}.toml"
    similar = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if similar:
        rule = "the name of a preset or recipe of `healcore policy list`"
        write = f"did you mean {similar[0]!r}? For a file write {name}.toml"
    shown = show_value(name)
    raise policy_error(shown, shown, rule, write, key="policy", unreadable=True)


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
        raise policy_error(
            source, show_value(text), "TOML text, a str", "text.decode(), or load(path)"
        )
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
        raise policy_error(source, reason, "TOML (https://toml.io)", write) from error


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
        raise policy_error(source, show_value(schema), rule, write, key="schema")
    policy, problems = read_document(data, Policy)
    if problems:
        raise PolicyError(source, problems)
    return policy


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
    raise policy_error(os.fsdecode(path), reason, rule, write, unreadable=True)


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
