"""Loads and validates a policy from a name, a file, text or a mapping.

The policies of healcore are TOML files in `healcore.policies`. Values that a user replaces, by
keywords of `load` or by `KEY=VALUE` of a command, are merged into the document before it is
validated.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from healcore import regular_file
from healcore.core.clipping import FixedConfig
from healcore.core.engine import Engine, EngineConfig
from healcore.core.ranges import NONE
from healcore.policy.document import NoClip, Policy, to_dict
from healcore.policy.reading import from_dict, policy_error, show_value

_PRESETS = ("default", "pretraining", "aggressive", "conservative", "observe", "zclip")
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
    data, source = _document_of(policy)
    if overrides:
        source = f"{source} with {', '.join(overrides)} given as keywords"
        data = merged(data, overrides)
    return from_dict(data, source=source)


def _document_of(policy: PolicySource) -> tuple[dict[str, Any], str]:
    """The unvalidated document of a policy, and its name in error messages."""
    if isinstance(policy, Policy):
        return to_dict(policy), policy.name
    if isinstance(policy, str) and not (policy.endswith(".toml") or Path(policy).name != policy):
        return _parse(preset_text(policy), policy), policy
    if isinstance(policy, str | os.PathLike):
        source = os.fsdecode(policy)
        return _parse(_read(policy), source), source
    rule = "a preset's name, a path, or a Policy; only these take keywords"
    write = '"default", or from_dict(...) for a mapping'
    raise policy_error(type(policy).__name__, show_value(policy), rule, write, key="policy")


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
    return from_dict(_parse(text, source), source=source)


def _parse(text: str, source: str) -> dict[str, Any]:
    """Parses TOML without validation."""
    try:
        return tomllib.loads(text)
    # ValueError includes TOMLDecodeError, impossible dates and numbers with too many digits. A
    # thousand nested brackets are a RecursionError.
    except (ValueError, RecursionError) as error:
        write = "correct the syntax at that place"
        raise policy_error(source, str(error), "TOML (https://toml.io)", write) from error


def _read(path: str | os.PathLike[str]) -> str:
    """Reads the file's text; raises `PolicyError`."""
    try:
        return regular_file.read(Path(path), _MAX_FILE_BYTES).decode()
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
        rule = "a text file in UTF-8 that can be read"
        write = f"the path of a TOML file, or a preset: {', '.join(_PRESETS)}"
        name = os.fsdecode(path)
        raise policy_error(name, str(error), rule, write, unreadable=True) from error


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
    return _PRESETS


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
        if file.suffix == ".toml" and file.stem not in _PRESETS:
            names.append(file.stem)
    return tuple(sorted(names))


def preset_text(name: str) -> str:
    """Reads the TOML text of a preset or recipe, including comments.

        Path("mine.toml").write_text(healcore.policy.preset_text("pretraining"))

    Args:
        name: one of `preset_names()` or `recipe_names()`.

    Returns:
        The text, a good start for a policy of your own.

    Raises:
        PolicyError: no policy has this name.
    """
    known = (*_PRESETS, *recipe_names())
    if name in known:
        return (resources.files("healcore.policies") / f"{name}.toml").read_text(encoding="utf-8")
    similar = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if similar:
        write = f"did you mean {similar[0]!r}? "
    else:
        write = f"one of {', '.join(known)}. "
    write += f"For a file write {name}.toml"
    shown = show_value(name)
    rule = "the name of a preset or recipe of `healcore policy list`"
    raise policy_error(shown, shown, rule, write, key="policy", unreadable=True)


def can_apply_limit(policy: Policy | Engine) -> bool:
    """Whether the policy's clipping can apply a fixed limit at every step.

    Args:
        policy: the policy or Engine of a trainer's run.

    Returns:
        False if the trainer has to clip, after the policy has measured: without clipping, where the
        trainer's own clip gives the same bits as without healcore; in observe mode; with AdaGC,
        whose limit ends with its warm-up; and for an Engine, whose numbers may be traced arrays.
    """
    return isinstance(policy, Policy) and policy.mode == "heal" and policy.clip.limits_every_step


def with_limit(policy: Policy | Engine, limit: float | None) -> Policy | Engine:
    """Gives a trainer's limit to the policy's clipping, unless the policy's own limit is lower.

    A trainer clips before the policy measures the norm, so a spike of 700 would be judged as 1.0.
    With this function the policy measures first, and clips.

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
    if isinstance(policy.clip, NoClip):
        return policy._replace(clip=FixedConfig(float(limit)))
    own: Any = policy.clip.max_norm
    if not policy.clip.limits_every_step or (own is not None and own <= limit):
        return policy
    return policy._replace(clip=policy.clip._replace(max_norm=float(limit)))


# -- values that a user replaces -----------------------------------------------------------------

Table = Mapping[str, Any]
"""A table of a policy file, not validated."""


class Overrides(TypedDict, total=False):
    """Keywords of `load` and of functions with a `policy` argument: the keys of a policy file.

        healcore.policy.load("default", clip={"max_norm": 1.0}, rollback={"probation": 50})

    A table is a mapping with the keys to change, `clip={"max_norm": None}`; other keys stay. For an
    optional number None means no limit, for a table under `detect` no detector, and for `clip` no
    clipping. Lists are replaced as a whole, and so is `clip` if its `kind` changes. A `max_norm`
    for a policy without clipping is the limit of `kind = "fixed"`.
    """

    name: str
    description: str
    references: Sequence[str]
    mode: Literal["heal", "observe"]
    max_skips: int
    grace_steps: int
    clip: Table | None
    detect: Table
    respond: Sequence[Table]
    incident: Table
    rollback: Table
    lr: Table
    budget: Table
    retry: Table
    skip_batch: Table
    hang: Table


def merged(data: Table, overrides: Table) -> dict[str, Any]:
    """Replaces values of a document. Tables are merged key by key.

    Args:
        data: the document, which is not changed.
        overrides: the values, as in `Overrides`.

    Returns:
        The new document, which `from_dict` has to validate.
    """
    new = dict(overrides)
    clip, changes = data.get("clip", {"kind": NONE}), overrides.get("clip")
    if isinstance(clip, Mapping) and isinstance(changes, Mapping):
        kind = clip.get("kind")
        if kind == NONE and "kind" not in changes:
            # A limit for a policy without clipping. Without a limit nothing changes.
            if changes == {"max_norm": None}:
                changes = {}
            else:
                changes = {"kind": "fixed", **changes}
        if changes.get("kind", kind) != kind:
            clip = {}  # the keys of one kind do not fit another
        data, new["clip"] = {**data, "clip": clip}, changes
    return _merged_tables(data, new)


def _merged_tables(old: Any, changes: Table) -> dict[str, Any]:
    """A copy of nested tables with values replaced. A key that is not named stays."""
    if isinstance(old, Mapping):
        new = dict(old)
    else:
        new = {}
    for key, value in changes.items():
        if isinstance(value, Mapping):
            new[key] = _merged_tables(new.get(key), value)
        else:
            new[key] = value
    return new


def parse_overrides(pairs: Iterable[str], option: str) -> dict[str, Any]:
    """Parses the `KEY=VALUE` pairs of an option of a command to the keywords of `load`.

    A key is dotted. A value has the syntax of TOML, but a string needs no quotes. The pairs are
    only collected here: `load` merges them into the tables of the policy, whose kind of clipping
    decides which keys exist.

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
