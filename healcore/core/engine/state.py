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


def plain(tree: Any) -> Any:
    """Converts NamedTuples to dicts, tuples to lists, and arrays to numbers."""
    if tree is None:
        return None
    if hasattr(tree, "_fields"):
        return {name: plain(part) for name, part in tree._asdict().items()}
    if isinstance(tree, tuple):
        return [plain(part) for part in tree]
    return np.asarray(tree).tolist()


def from_plain(template: Any, data: Any, place: str) -> Any:
    """Restores the structure, dtypes and shapes of `template`; errors name `place`."""
    if isinstance(template, np.ndarray):
        return _array(template, data, place)
    is_mapping = isinstance(data, Mapping)
    if hasattr(template, "_fields") and is_mapping and set(data) == set(template._fields):
        fields = template._asdict().items()
        return type(template)(*(from_plain(x, data[n], f"{place}.{n}") for n, x in fields))
    if type(template) is tuple and isinstance(data, list | tuple) and len(data) == len(template):
        parts: Any = enumerate(zip(template, data, strict=True))
        return tuple(from_plain(part, each, f"{place}[{i}]") for i, (part, each) in parts)
    if template is None and data is None:
        return None
    raise StateError(
        f"{place} must have the structure of {plain(template)!r:.120}, got {data!r:.80}: the "
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
