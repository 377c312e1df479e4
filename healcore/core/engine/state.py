"""The engine's state, a fixed-size pytree of NumPy, JAX or torch arrays, and its saved form.

The saved form is nested dicts of Python numbers, bools and lists, which `json.dumps` accepts. It
moves a state between frameworks, processes and machines. A float32 is saved exactly, because its
repr as a double is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from healcore.core.engine.config import EngineConfig, RuleConfig
from healcore.core.engine.incident import BudgetState, IncidentState
from healcore.core.engine.lr import LrState
from healcore.core.errors import HealcoreError
from healcore.core.tree import Flag, Int, map_leaves, zeros
from healcore.core.verdict import Decision, Telemetry

SCHEMA = 7  # version of the saved form

_MAX_GROUPS = 10_000_000
_NEVER = 1 << 30


class StateError(HealcoreError, ValueError):
    """A saved state that does not fit the policy; the message says where, and what to do."""


class Tally(NamedTuple):
    """Counts since the run began."""

    clips: Int  # steps whose gradient was clipped
    skips: Int  # skipped steps
    alarms: Int  # steps with a cause
    rollbacks: Int  # rollbacks that the host performed
    lr_cuts: Int  # cuts of the learning rate


class RuleState(NamedTuple):
    """Hits of one rule, and its last firing."""

    run: Int  # hits in a row; 0 for a rule that fires at one hit
    window: Int  # (within,): ring of the last steps, 1 for a hit; (0,) without a window
    age: Int  # steps since the rule last fired; only counted for `ONCE`


class EngineState(NamedTuple):
    """Everything that a decision depends on, except the policy and the step's signals."""

    step: Int  # steps judged
    change_expected: Flag  # the next step opens the grace window
    grace: Int  # remaining steps of the grace window
    clip: Any  # state of the clipping rule, or None
    detectors: tuple[Any, ...]  # state of each detector, in the policy's order
    rules: tuple[RuleState, ...]
    skips: Int  # finite steps skipped in a row; a step without an alarm resets the count
    incident: IncidentState
    budget: BudgetState
    lr: LrState
    tally: Tally
    last: Telemetry


def neutral(*, groups: int | None = None) -> Decision:
    """Returns the decision that changes nothing, as NumPy arrays.

    `groups` is the number of tensors of a per-tensor clipping rule, or None for any other policy.
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
    kind, clip = config.clip or (None, None)
    orders = ("onset", "recovered", "cut", "last_onset")
    none_yet = {name: np.full((), -1, np.int32) for name in orders}
    state = EngineState(
        step=np.zeros((), np.int32),
        change_expected=np.zeros((), bool),
        grace=np.zeros((), np.int32),
        clip=None if clip is None else clip.init(groups=groups),
        detectors=tuple(detector.init() for _, detector in config.detectors),
        rules=tuple(init_rule(rule) for rule in config.rules),
        skips=np.zeros((), np.int32),
        incident=zeros(IncidentState)._replace(**none_yet),
        budget=BudgetState(
            np.asarray(config.budget.recoveries, np.int32),
            np.asarray(config.budget.lr_cuts, np.int32),
            np.zeros((), np.int32),
        ),
        lr=zeros(LrState)._replace(scale=np.ones((), np.float32)),
        tally=zeros(Tally),
        last=Telemetry(
            neutral(groups=groups if kind == "adagc" else None),
            *(np.zeros((), np.float32) for _ in range(5)),
        ),
    )
    if not batch:
        return state
    return map_leaves(lambda leaf: np.broadcast_to(leaf, batch + leaf.shape).copy(), state)


def init_rule(config: RuleConfig) -> RuleState:
    """The state of a rule without hits."""
    window = np.zeros((config.within,), np.int32)
    return zeros(RuleState)._replace(window=window, age=np.full((), _NEVER, np.int32))


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
    if isinstance(template, np.ndarray):
        return _array(template, data, place)
    is_mapping = isinstance(data, Mapping)
    if hasattr(template, "_fields") and is_mapping and set(data) == set(template._fields):
        fields = template._asdict().items()
        return type(template)(*(_arrays(x, data[n], f"{place}.{n}") for n, x in fields))
    if type(template) is tuple and isinstance(data, list | tuple) and len(data) == len(template):
        parts: Any = enumerate(zip(template, data, strict=True))
        return tuple(_arrays(part, each, f"{place}[{i}]") for i, (part, each) in parts)
    if template is None and data is None:
        return None
    raise StateError(
        f"{place} must have the structure of {_plain(template)!r:.120}, got {data!r:.80}: the "
        "saved state belongs to another policy, or is damaged"
    )


def _array(template: np.ndarray, data: Any, place: str) -> np.ndarray:
    """Restores one array, checked for kind, shape and finiteness."""
    try:
        array = np.asarray(data)
        with np.errstate(all="ignore"):
            cast = array.astype(template.dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise StateError(f"{place} must be {template.dtype}, got {data!r:.80}") from error
    if cast.shape != template.shape:
        raise StateError(
            f"{place} must have shape {template.shape}, got {cast.shape}: the policy's windows or "
            "the number of tensors differ from those of the saved state"
        )
    kinds = {"b": "b", "i": "i", "f": "fi"}[template.dtype.kind]
    fits = array.dtype.kind in kinds and (template.dtype.kind != "i" or (cast == array).all())
    if array.size and not (fits and np.isfinite(cast).all()):
        raise StateError(f"{place} must be finite and {template.dtype}, got {data!r:.80}")
    return cast
