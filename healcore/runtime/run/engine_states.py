"""Changes of engine states between two steps: after a rollback, by limits of rates and norms.

An adapter holds the states of the engines. Here they are JSON-safe values by engine name, as
`Driver.engines` returns them and `Driver.load` takes them. All functions are pure: they return new
states, and the driver loads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from healcore.core.array_namespace import FLOAT32_MAX
from healcore.core.engine import Engine, StateError
from healcore.runtime.driver import Engines, Rates
from healcore.runtime.run.envelope import SavedRate
from healcore.runtime.run.healthy_ranges import HealthyValues


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


class RatesAfterRollback(NamedTuple):
    """The engine states after a rollback, and the numbers that its event reports.

    `limit_rates` computes it from the states of the checkpoint and the order. Nothing is changed
    before the driver loads `engines`.
    """

    engines: dict[str, Any]
    """Engine name -> its state, as JSON-safe values."""
    limits: dict[str, float]
    """Engine name -> upper limit of its learning rate, as far as it is known and set."""
    scales: dict[str, float]
    """Engine name -> multiplier of its learning rate at the restored step, in (0, 1]."""


def limit_rates(
    engine: Engine,
    engines: Engines,
    at_fault: Mapping[str, float],
    rates: Rates,
    *,
    healthy: bool,
    learnt: HealthyValues,
) -> RatesAfterRollback:
    """Engine states with learning rates that fit the schedule at the restored step.

    With `at_fault`, and if the policy has a cut left, each optimizer whose rate at the fault was
    above its last healthy rate is limited to that rate. If no such rate is known, the limit of each
    is the policy's factor times the rate at the fault. A multiplier stays as it is if the rate is
    unknown, or if the policy's cuts do not depend on it.

    Args:
        engine: engine of the policy.
        engines: states after the rollback, with the multipliers of the live run.
        at_fault: learning rates in force at the fault, or the multiplier where it is unknown;
            empty for no new limit.
        rates: at the restored step.
        healthy: whether steps before the restored step were trained at `rates`.
        learnt: rates at which the run was healthy. They count where the rate at the restored step
            is above them all: a scheduler may have set the wrong rate before the checkpoint.

    Returns:
        The states with their limits and multipliers.
    """
    known: dict[str, np.float32] = {}  # rates at the restored step that the engine can limit
    for name, rate in rates.items() if engine.limits_lr else ():
        if rate is not None and name in engines:
            # A rate beyond float32 counts as unknown. Without the limit NumPy would warn of it.
            known[name] = np.float32(min(rate, FLOAT32_MAX))
    states = {name: engine.from_dict(state) for name, state in engines.items()}
    lower: dict[str, float] = {}
    for name in at_fault.keys() & known.keys() if healthy else ():
        in_force = float(rates[name] or 0) * float(states[name].lr.scale)
        last_healthy = learnt.healthy_rate(name, in_force)
        if 0 < last_healthy < at_fault[name]:
            lower[name] = last_healthy
    factor = float(engine.config.lr.factor)
    for name, limit in (lower or {name: factor * at_fault[name] for name in at_fault}).items():
        states[name] = engine.limit_lr(states[name], np.float32(limit), known.get(name))
    found = RatesAfterRollback({}, {}, {})
    for name, state in states.items():
        if name in known:
            state = engine.apply_rate(state, known[name])
            lr = state.lr
            if lr.hold:
                limit = lr.rate_after_cut
            else:
                limit = engine.config.lr.ceiling * lr.rate_at_cut
            if limit > 0:
                found.limits[name] = float(limit)
        found.scales[name] = float(state.lr.scale)
        found.engines[name] = engine.to_dict(state)
    return found


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
