"""The engine's state, a fixed-size pytree of NumPy, JAX or torch arrays, and its saved form.

The saved form is nested dicts of Python numbers, bools and lists, which `json.dumps` accepts. It
moves a state between frameworks, processes and machines. A float32 is saved exactly, because its
repr as a double is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from healcore.core.engine import incident, lr, rules
from healcore.core.engine.config import EngineConfig
from healcore.core.errors import HealcoreError
from healcore.core.tree import map_leaves
from healcore.core.verdict import Decision, Telemetry

SCHEMA = 7  # version of the saved form

_MAX_GROUPS = 10_000_000


class StateError(HealcoreError, ValueError):
    """A saved state that does not fit the policy; the message says where, and what to do."""


class Tally(NamedTuple):
    """Counts since the run began."""

    clips: Any
    """int32: steps whose gradient was clipped."""
    skips: Any
    """int32: skipped steps."""
    alarms: Any
    """int32: steps with a cause."""
    rollbacks: Any
    """int32: rollbacks that the host performed."""
    lr_cuts: Any
    """int32: cuts of the learning rate."""


class EngineState(NamedTuple):
    """Everything that a decision depends on, except the policy and the step's signals."""

    step: Any
    """int32: steps judged."""
    change_expected: Any
    """bool: the next step opens the grace window."""
    grace: Any
    """int32: remaining steps of the grace window."""
    clip: Any
    """State of the clipping rule, or None."""
    detectors: tuple[Any, ...]
    """State of each detector, in the policy's order."""
    rules: tuple[rules.RuleState, ...]
    skips: Any
    """int32: finite steps skipped in a row; see `rules.limit_skips`."""
    incident: incident.IncidentState
    budget: incident.BudgetState
    lr: lr.LrState
    tally: Tally
    last: Telemetry


def neutral(*, groups: int | None = None) -> Decision:
    """Returns the decision that changes nothing, as NumPy arrays.

    Args:
        groups: number of tensors for a per-tensor clipping rule, else None.
    """
    one, zero = np.ones((), np.float32), np.zeros((), np.int32)
    return Decision(
        grad_scale=one,
        skip=np.zeros((), bool),
        lr_scale=one.copy(),
        action=zero,
        cause=zero.copy(),
        rollback_depth=zero.copy(),
        group_scale=None if groups is None else np.ones((groups,), np.float32),
    )


def init(config: EngineConfig, *, groups: int = 0, batch: tuple[int, ...] = ()) -> EngineState:
    """The state before the first step, as NumPy arrays; see `Engine.init`."""
    clip_state = None
    per_tensor = None
    if config.clip is not None:
        name, clip = config.clip
        clip_state = clip.init(groups=groups)
        per_tensor = groups if name == "adagc" else None
    zero_float, zero_int = np.zeros((), np.float32), np.zeros((), np.int32)
    state = EngineState(
        step=zero_int,
        change_expected=np.zeros((), bool),
        grace=zero_int.copy(),
        clip=clip_state,
        detectors=tuple(detector.init() for _, detector in config.detectors),
        rules=tuple(rules.init(rule) for rule in config.rules),
        skips=zero_int.copy(),
        incident=incident.init(),
        budget=incident.full_budget(config.budget),
        lr=lr.init(),
        tally=Tally(*(zero_int.copy() for _ in Tally._fields)),
        last=Telemetry(neutral(groups=per_tensor), *(zero_float.copy() for _ in range(5))),
    )
    if not batch:
        return state
    return map_leaves(lambda leaf: np.broadcast_to(leaf, batch + leaf.shape).copy(), state)


def metrics(state: EngineState) -> dict[str, Any]:
    """The last step, and counts so far, as 0-d arrays for a logger; no array is copied.

    Counts include steps that a rollback has undone. `heal/loss` and `heal/grad_norm` are the last
    finite values, and `heal/threshold` is 0 without a threshold. `heal/cause` and `heal/action` are
    flags. In observe mode the numbers say what healing would have done.
    """
    last, tally = state.last, state.tally
    return {
        "heal/loss": last.loss,
        "heal/grad_norm": last.grad_norm,
        "heal/threshold": last.threshold,
        "heal/z": last.z,
        "heal/z_loss": last.z_loss,
        "heal/grad_scale": last.decision.grad_scale,
        "heal/skip": last.decision.skip,
        "heal/lr_scale": last.decision.lr_scale,
        "heal/cause": last.decision.cause,
        "heal/action": last.decision.action,
        "heal/steps": state.step,
        "heal/clips": tally.clips,
        "heal/skips": tally.skips,
        "heal/alarms": tally.alarms,
        "heal/rollbacks": tally.rollbacks,
        "heal/lr_cuts": tally.lr_cuts,
        "heal/incidents": state.incident.number,
    }


def to_dict(config: EngineConfig, state: EngineState, policy: str | None) -> dict[str, Any]:
    """Converts the state of any backend to JSON-safe Python data; this syncs the device.

    Returns `{"schema": 7, "policy": fingerprint, "clip": name, "detectors": [names], "groups": n,
    "state": {...}}`, with `policy` from `Engine.fingerprint`.
    """
    scale = state.last.decision.group_scale
    return {
        "schema": SCHEMA,
        "policy": policy,
        "clip": config.clip[0] if config.clip else None,
        "detectors": [name for name, _ in config.detectors],
        "groups": 0 if scale is None else int(np.asarray(scale).shape[-1]),
        "state": _plain(state),
    }


def from_dict(config: EngineConfig, data: Mapping[str, Any], policy: str | None) -> EngineState:
    """Converts the result of `to_dict` to NumPy arrays; raises `StateError` if it does not fit."""
    if not isinstance(data, Mapping):
        raise StateError(f"a saved state must be a mapping, got {type(data).__name__}")
    if data.get("schema") != SCHEMA or isinstance(data.get("schema"), bool):
        raise StateError(
            f"the saved state has schema {data.get('schema')!r}, but this version reads {SCHEMA}: "
            "start from a fresh state, or use the version that wrote it"
        )
    clip = config.clip[0] if config.clip else None
    names = [name for name, _ in config.detectors]
    if data.get("clip") != clip or data.get("detectors") != names:
        raise StateError(
            f"the saved state belongs to a policy with clip {data.get('clip')!r} and detectors "
            f"{data.get('detectors')}, but this policy has clip {clip!r} and detectors {names}: "
            "load the state with its own policy, or start from a fresh state"
        )
    saved = data.get("policy")  # None for a policy with arrays as numbers
    if saved is not None and policy is not None and saved != policy:
        raise StateError(
            "the saved state belongs to a policy with other numbers: its fingerprint is "
            f"{saved!r:.40}, not {policy!r}; load the state with its own policy, or start from a "
            "fresh state, whose detectors warm up again"
        )
    groups = data.get("groups")
    if not isinstance(groups, int) or isinstance(groups, bool) or not 0 <= groups <= _MAX_GROUPS:
        raise StateError(f"groups must be a number of tensors up to {_MAX_GROUPS}, got {groups!r}")
    return _arrays(init(config, groups=groups), data.get("state"), "state")


def _plain(tree: Any) -> Any:
    """Converts NamedTuples to dicts, tuples to lists, and arrays to numbers."""
    if tree is None:
        return None
    if hasattr(tree, "_fields"):
        return {name: _plain(part) for name, part in tree._asdict().items()}
    if isinstance(tree, tuple):
        return [_plain(part) for part in tree]
    return np.asarray(tree).tolist()


def _arrays(template: Any, data: Any, place: str) -> Any:
    """Restores the structure, dtypes and shapes of `template`; errors name `place`."""
    if template is None:
        if data is not None:
            raise StateError(f"{place} must be null under this policy, got {type(data).__name__}")
        return None
    if hasattr(template, "_fields"):
        fields = template._asdict()
        if not isinstance(data, Mapping) or set(data) != set(fields):
            got = sorted(data) if isinstance(data, Mapping) else type(data).__name__
            raise StateError(f"{place} must have exactly {sorted(fields)}, got {got}")
        parts = (_arrays(part, data[name], f"{place}.{name}") for name, part in fields.items())
        return type(template)(*parts)
    if isinstance(template, tuple):
        if not isinstance(data, list | tuple) or len(data) != len(template):
            raise StateError(
                f"{place} must be a list of {len(template)}, got {data!r:.80}: the policy's "
                "rules or detectors differ from those of the saved state"
            )
        pairs = enumerate(zip(template, data, strict=True))
        return tuple(_arrays(part, each, f"{place}[{i}]") for i, (part, each) in pairs)
    return _leaf(template, data, place)


def _leaf(template: np.ndarray, data: Any, place: str) -> np.ndarray:
    """Restores one array, checked for kind, shape and finiteness."""
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
            "the number of tensors differ from those of the saved state"
        )
    if template.dtype.kind == "f" and not np.isfinite(cast).all():
        raise StateError(f"{place} must be finite, got {data!r:.80}")
    return cast
