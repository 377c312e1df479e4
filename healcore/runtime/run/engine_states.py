"""Changes of engine states between two steps: after a rollback, and by limits of gradient norms.

An adapter holds the states of the engines. Here they are JSON-safe values by engine name, as
`Driver.engines` returns them and `Driver.load` takes them. All functions are pure: they return new
states, and the driver loads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from healcore.core.engine import Engine, StateError
from healcore.runtime.driver import Engines
from healcore.runtime.run.envelope import SavedRate


def engines_after_rollback(engine: Engine, live: Engines, saved: Engines | None) -> Engines:
    """Engine states after a rollback: detectors as saved, budgets and multipliers as they are now.

    Otherwise a rollback would give the run its budget of rollbacks back, and could repeat forever.

    Args:
        engine: engine of the policy.
        live: states of the run before the rollback.
        saved: states in the restored checkpoint. An engine without a saved state restarts its
            warm-up.

    Returns:
        The states, for the engines of `live`.
    """
    merged = {}
    for name, state in live.items():
        now = engine.from_dict(state)
        if saved is not None and saved.get(name) is not None:
            before = engine.from_dict(saved[name])
        else:
            before = engine.init(groups=state["groups"])
        merged[name] = engine.to_dict(engine.on_rollback(now, before))
    return merged


def limit_norms(
    engine: Engine, engines: Engines, limits: Mapping[str, float], *, freeze: bool = False
) -> Engines:
    """Engine states with these limits of the gradient norm, and without any other.

    Args:
        engine: engine of the policy.
        engines: states, by engine name.
        limits: largest norm of the gradients, above 0, by engine name. An engine that is missing
            here has no limit from now on.
        freeze: whether all steps from now on change no weights. The limits have no effect then.

    Returns:
        The states.
    """
    limited = {}
    for name, saved in engines.items():
        state = engine.from_dict(saved)
        if freeze:
            state = engine.freeze(state)
        else:
            state = engine.limit_norm(state, np.float32(limits.get(name, 0.0)))
        limited[name] = engine.to_dict(state)
    return limited


def rates_of(engines: Engines) -> dict[str, SavedRate]:
    """The learning-rate part of engine states, to undo a limit later.

    A limit of the rate changes this part only. `with_rates` puts the copy back.

    Args:
        engines: engine name -> its state, as `Driver.engines` returns it.

    Returns:
        Engine name -> a copy of the part.
    """
    return {name: dict(each["state"]["lr"]) for name, each in engines.items()}


def with_rates(engines: Engines, before: Mapping[str, SavedRate]) -> Engines:
    """Engine states with an earlier learning-rate part: the limits since then are undone.

    Args:
        engines: states, by engine name.
        before: result of `rates_of`. An engine without an entry keeps its learning-rate part.

    Returns:
        The states.
    """
    changed = {}
    for name, each in engines.items():
        state = each["state"]
        changed[name] = {**each, "state": {**state, "lr": before.get(name, state["lr"])}}
    return changed


def engines_of_new_start(engine: Engine, engines: Engines) -> dict[str, Any]:
    """Engine states whose incidents, budgets, rates and limits are those of a new run.

    Args:
        engine: engine of the policy.
        engines: engine name -> its state in a checkpoint.
    """
    fresh = {}
    for name, each in engines.items():
        state, new = engine.from_dict(each), engine.init(groups=each["groups"])
        state = state._replace(
            incident=new.incident, budget=new.budget, lr=new.lr, norm_limit=new.norm_limit
        )
        fresh[name] = engine.to_dict(state)
    return fresh


def compatible_states(engine: Engine, saved: Engines) -> tuple[dict[str, Any], str]:
    """The saved states that fit this policy.

    A checkpoint stays usable after a change of the policy: the detectors restart their warm-up.

    Args:
        engine: engine of the policy.
        saved: states in a checkpoint.

    Returns:
        The states that fit, by engine name; and the problem of the last one that does not fit, or
        an empty string.
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
