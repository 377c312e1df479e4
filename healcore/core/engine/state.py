"""The engine's memory: a fixed-size pytree of NumPy, JAX or torch arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core.clipping import RULES, update_clip
from healcore.core.detectors import DETECTORS
from healcore.core.engine import budget, incident, lr, rules
from healcore.core.engine.config import EngineConfig
from healcore.core.tree import map_leaves
from healcore.core.verdict import Decision, Telemetry


class Tally(NamedTuple):
    """Counts since the run began."""

    clips: Any
    """int32: steps whose gradient was clipped."""
    skips: Any
    """int32: skipped steps."""
    alarms: Any
    """int32: steps with a cause."""
    rollbacks: Any
    """int32: rollbacks that were carried out."""
    lr_cuts: Any
    """int32: cuts of the learning rate."""


class EngineState(NamedTuple):
    """All that a decision depends on, besides the policy and this step's signals."""

    step: Any
    """int32: steps judged."""
    change_expected: Any
    """bool: a change was expected since the last step."""
    grace: Any
    """int32: steps left in the grace window."""
    clip: Any
    """State of the clipping rule, or None."""
    detectors: tuple[Any, ...]
    """State of each detector, in the policy's order."""
    rules: tuple[rules.RuleState, ...]
    skips: Any
    """int32: finite steps skipped in a row; see `skip_limit`."""
    incident: incident.IncidentState
    budget: budget.BudgetState
    lr: lr.LrState
    tally: Tally
    last: Telemetry
    update_clip: Any = None
    """`update_clip.UpdateClipState`, or None for a policy without that clip."""


def neutral(*, groups: int | None = None) -> Decision:
    """The decision that changes nothing, as NumPy arrays.

    Args:
        groups: number of tensors for a per-tensor clipping rule, else None.
    """
    one, none = np.ones((), np.float32), np.zeros((), np.int32)
    return Decision(
        grad_scale=one,
        skip=np.zeros((), bool),
        lr_scale=one.copy(),
        action=none,
        cause=none.copy(),
        rollback_depth=none.copy(),
        group_scale=None if groups is None else np.ones((groups,), np.float32),
    )


def init(config: EngineConfig, *, groups: int = 0, batch: tuple[int, ...] = ()) -> EngineState:
    """The state before the first step, as NumPy arrays; see `Engine.init`."""
    clip_state = None
    per_tensor = None
    if config.clip is not None:
        name, clip_config = config.clip
        clip_state = RULES[name].init(clip_config, groups=groups)
        per_tensor = groups if name == "adagc" else None
    zero, none = np.zeros((), np.float32), np.zeros((), np.int32)
    state = EngineState(
        step=none,
        change_expected=np.zeros((), bool),
        grace=none.copy(),
        clip=clip_state,
        detectors=tuple(DETECTORS[name].init(each) for name, each in config.detectors),
        rules=tuple(rules.init(rule) for rule in config.rules),
        skips=none.copy(),
        incident=incident.init(),
        budget=budget.init(config.budget),
        lr=lr.init(),
        tally=Tally(*(none.copy() for _ in Tally._fields)),
        last=Telemetry(neutral(groups=per_tensor), *(zero.copy() for _ in range(5))),
        update_clip=None if config.update_clip is None else update_clip.init(config.update_clip),
    )
    if not batch:
        return state
    return map_leaves(lambda leaf: np.broadcast_to(leaf, batch + leaf.shape).copy(), state)
