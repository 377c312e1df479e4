"""Moves the engine's state from one framework, process or machine to another.

The neutral form is nested dicts of Python numbers, bools and lists. `json.dumps` takes it as it is,
and float32 survives exactly: its repr as a double is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from healcore.core.engine.config import EngineConfig
from healcore.core.engine.state import EngineState, init
from healcore.core.errors import HealcoreError

SCHEMA = 5  # version of the neutral form

_MOST_GROUPS = 10_000_000


class StateError(HealcoreError, ValueError):
    """A saved state that this policy cannot take; the message names the place and the remedy."""


def to_dict(config: EngineConfig, state: EngineState, policy: str | None) -> dict[str, Any]:
    """The state of any backend (a device sync) as JSON-safe Python data.

    `{"schema": 5, "policy": fingerprint, "clip": name, "detectors": [names], "groups": n, "state":
    {...}}`; `policy` is from `Engine.fingerprint`.
    """
    scale = state.last.decision.group_scale
    plain = _plain(state)
    if config.update_clip is None:
        del plain["update_clip"]  # as before there was such a clip
    return {
        "schema": SCHEMA,
        "policy": policy,
        "clip": config.clip[0] if config.clip else None,
        "detectors": [name for name, _ in config.detectors],
        "groups": 0 if scale is None else int(np.asarray(scale).shape[-1]),
        "state": plain,
    }


def from_dict(config: EngineConfig, data: Mapping[str, Any], policy: str | None) -> EngineState:
    """The state that `to_dict` wrote, as NumPy arrays; raises `StateError` if it does not fit."""
    if not isinstance(data, Mapping):
        raise StateError(f"a saved state must be a mapping, got {type(data).__name__}")
    if data.get("schema") != SCHEMA or isinstance(data.get("schema"), bool):
        raise StateError(
            f"the saved state has schema {data.get('schema')!r}, this version reads {SCHEMA}: "
            "start from a fresh state, or use the version that wrote it"
        )
    clip = config.clip[0] if config.clip else None
    names = [name for name, _ in config.detectors]
    if data.get("clip") != clip or data.get("detectors") != names:
        raise StateError(
            f"the saved state is of a policy with clip {data.get('clip')!r} and detectors "
            f"{data.get('detectors')}, this one has clip {clip!r} and detectors {names}: "
            "load it with the policy that it was saved under, or start from a fresh state"
        )
    saved = data.get("policy")  # older releases do not write it
    if saved is not None and policy is not None and saved != policy:
        raise StateError(
            f"the saved state is of a policy with other numbers ({saved!r:.40}), this one "
            f"has {policy!r}: load it with the policy that it was saved under, or start from a "
            "fresh state, whose detectors warm up again"
        )
    groups = data.get("groups")
    if not isinstance(groups, int) or isinstance(groups, bool) or not 0 <= groups <= _MOST_GROUPS:
        raise StateError(f"groups must be a number of tensors up to {_MOST_GROUPS}, got {groups!r}")
    state = data.get("state")
    if config.update_clip is None and isinstance(state, Mapping) and "update_clip" not in state:
        state = {**state, "update_clip": None}
    return _arrays(init(config, groups=groups), state, "state")


def _plain(tree: Any) -> Any:
    """NamedTuples to dicts, tuples to lists, arrays to numbers."""
    if tree is None:
        return None
    if isinstance(tree, tuple):
        fields = getattr(tree, "_fields", None)
        if fields is None:
            return [_plain(part) for part in tree]
        return {name: _plain(part) for name, part in zip(fields, tree, strict=True)}
    return np.asarray(tree).tolist()


def _arrays(template: Any, data: Any, place: str) -> Any:
    """Back into the structure of `template`, with its dtypes and shapes; errors name `place`."""
    if template is None:
        if data is not None:
            raise StateError(f"{place} must be null under this policy, got {type(data).__name__}")
        return None
    if isinstance(template, tuple):
        fields = getattr(template, "_fields", None)
        if fields is None:
            if not isinstance(data, list | tuple) or len(data) != len(template):
                raise StateError(
                    f"{place} must be a list of {len(template)}, got {data!r:.80}: the policy's "
                    "rules or detectors differ from those it was saved under"
                )
            return tuple(
                _arrays(part, each, f"{place}[{i}]")
                for i, (part, each) in enumerate(zip(template, data, strict=True))
            )
        if not isinstance(data, Mapping) or set(data) != set(fields):
            got = sorted(data) if isinstance(data, Mapping) else type(data).__name__
            raise StateError(f"{place} must have exactly {sorted(fields)}, got {got}")
        return type(template)(
            *(
                _arrays(part, data[name], f"{place}.{name}")
                for name, part in zip(fields, template, strict=True)
            )
        )
    return _leaf(template, data, place)


def _leaf(template: np.ndarray, data: Any, place: str) -> np.ndarray:
    """One array, checked for kind, shape and finiteness."""
    try:
        array = np.asarray(data)
        with np.errstate(over="ignore"):
            cast = array.astype(template.dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise StateError(f"{place} must be {template.dtype}, got {data!r:.80}") from error
    kinds = {"b": "b", "i": "i", "f": "fi"}[template.dtype.kind]
    fits = array.dtype.kind in kinds and (template.dtype.kind != "i" or (cast == array).all())
    if array.size and not fits:
        raise StateError(f"{place} must be {template.dtype}, got {data!r:.80}")
    if cast.shape != template.shape:
        raise StateError(
            f"{place} must have shape {template.shape}, got {cast.shape}: the policy's windows or "
            "the number of tensors differ from those it was saved under"
        )
    if template.dtype.kind == "f" and not np.isfinite(cast).all():
        raise StateError(f"{place} must be finite, got {data!r:.80}")
    return cast
