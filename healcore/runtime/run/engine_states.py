"""Changes of engine states between two steps: after a rollback, and by limits of gradient norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from healcore.core.engine import Engine, StateError
from healcore.runtime.driver import Engines


def engines_after_rollback(engine: Engine, live: Engines, saved: Engines | None) -> Engines:
    """Engine states after a rollback. An engine without a saved state restarts its warm-up."""
    merged = {}
    for name, state in live.items():
        now = engine.from_dict(state)
        then = (saved or {}).get(name)
        before = engine.init(groups=state["groups"]) if then is None else engine.from_dict(then)
        merged[name] = engine.to_dict(engine.on_rollback(now, before, xp=np))
    return merged


def limit_norms(
    engine: Engine, engines: Engines, limits: Mapping[str, float], *, withhold: bool = False
) -> Engines:
    """Engine states with these limits of the gradient norm, and without any other.

    Args:
        engine: engine of the policy.
        engines: states, by engine name.
        limits: largest norm of the gradients, above 0, by engine name. An engine without a limit
            here has none from now on.
        withhold: whether all steps from now on are withheld, which needs no limit.
    """
    limited = {}
    for name, saved in engines.items():
        state = engine.from_dict(saved)
        if withhold:
            state = engine.withhold(state)
        else:
            state = engine.limit_norm(state, np.float32(limits.get(name, 0.0)), xp=np)
        limited[name] = engine.to_dict(state)
    return limited


def norm_limits(engines: Engines) -> dict[str, float]:
    """The limits of the gradient norm in force, by engine name."""
    found = {name: float(each["state"]["norm_limit"]) for name, each in engines.items()}
    return {name: limit for name, limit in found.items() if limit > 0}


def lr_states(engines: Engines) -> dict[str, dict[str, Any]]:
    """The learning-rate part of engine states, by engine name."""
    return {name: dict(each["state"]["lr"]) for name, each in engines.items()}


def with_lr_states(engines: Engines, before: Engines) -> Engines:
    """Engine states with the learning-rate part of `lr_states` where it has the engine."""
    return {
        name: {**each, "state": {**each["state"], "lr": before.get(name, each["state"]["lr"])}}
        for name, each in engines.items()
    }


def compatible_states(engine: Engine, saved: Engines) -> tuple[dict[str, Any], str]:
    """The saved states that fit this policy, and the problem of the others or an empty string.

    A checkpoint stays usable after a change of the policy: the detectors restart their warm-up.
    """
    fit = {}
    problem = ""
    for name, state in saved.items():
        try:
            engine.from_dict(state)
            fit[name] = state
        except StateError as error:
            problem = f"the detectors of {name} restart their warm-up: {error}"
    return fit, problem
