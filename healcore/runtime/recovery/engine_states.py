"""Computes the engine states after a rollback. Framework-neutral: dicts in, dicts out.

Detector states come from the checkpoint, so that they match the restored history. Budgets and the
learning-rate multiplier come from the live run: restored ones would refund the attempt and undo the
cut of the learning rate (OPT-175B's logbook shows both).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from healcore.core.engine import Engine, StateError

Engines = Mapping[str, Mapping[str, Any]]
"""Engine name -> `Engine.to_dict`."""


def after_rollback(
    engine: Engine, live: Engines, saved: Engines | None, *, counted: bool = False
) -> dict[str, dict[str, Any]]:
    """Engine states after a rollback. An engine without a saved state restarts its warm-up.

    `counted` says that the budgets in `live` already include this rollback.
    """
    then = saved or {}
    return {name: _merge(engine, now, then.get(name), counted) for name, now in live.items()}


def limited(
    engine: Engine, engines: Engines, broken: float, rate: float | None, *, healthy: bool
) -> dict[str, dict[str, Any]]:
    """Engine states with a limit on the learning rate, if the policy has a cut left.

    The limit is the last healthy rate. If this rate is unknown, or not lower than the rate at the
    fault, the limit is the policy's factor times the rate at the fault.

    Args:
        engine: engine of the policy.
        engines: states after the rollback, with the multipliers of the live run.
        broken: learning rate in force at the fault, or the multiplier alone if it is unknown.
        rate: the schedule's rate at the restored step, or None if unknown.
        healthy: whether steps before the restored step were trained at `rate`.
    """
    rate = rate if engine.limits_lr else None
    states = {}
    for name, each in engines.items():
        state = engine.from_dict(each)
        before = rate * float(state.lr.scale) if healthy and rate else broken
        limit = before if before < broken else broken * float(engine.config.lr.factor)
        at = None if rate is None else np.float32(rate)
        states[name] = engine.to_dict(engine.limit_lr(state, np.float32(limit), at, xp=np))
    return states


def lr_states(engines: Engines) -> dict[str, dict[str, Any]]:
    """The learning-rate part of engine states, by engine name."""
    return {name: dict(each["state"]["lr"]) for name, each in engines.items()}


def with_lr_states(
    engines: Engines, before: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Engine states with the learning-rate part of `lr_states` where it has the engine."""
    return {
        name: {**each, "state": {**each["state"], "lr": before.get(name, each["state"]["lr"])}}
        for name, each in engines.items()
    }


def apply_rate(
    engine: Engine, engines: Engines, rate: float | None
) -> tuple[dict[str, dict[str, Any]], float | None, float]:
    """Adapts engine states to the schedule's restored rate.

    The multipliers stay as they are if `rate` is None, for an unknown rate, or if the policy's cuts
    do not depend on the rate.

    Returns:
        The states; the learning-rate limit, or None if it is unknown or not set; and the smallest
        multiplier of all engines.
    """
    rate = rate if engine.limits_lr else None
    states = {name: engine.from_dict(each) for name, each in engines.items()}
    if rate is not None:
        at = np.float32(rate)
        states = {name: engine.apply_rate(each, at, xp=np) for name, each in states.items()}
    ceiling = engine.config.lr.ceiling
    limits = [
        float(each.lr.low if each.lr.hold else ceiling * each.lr.broken) for each in states.values()
    ]
    limit = min((each for each in limits if each > 0), default=None)
    scale = min((float(each.lr.scale) for each in states.values()), default=1.0)
    adapted = {name: engine.to_dict(each) for name, each in states.items()}
    return adapted, None if rate is None else limit, scale


def _merge(
    engine: Engine, live: Mapping[str, Any], saved: Mapping[str, Any] | None, counted: bool
) -> dict[str, Any]:
    now = engine.from_dict(live)
    then = engine.init(groups=live["groups"]) if saved is None else engine.from_dict(saved)
    merged = engine.on_rollback(now, then, xp=np)
    if counted:
        merged = merged._replace(budget=now.budget, tally=now.tally)
    return engine.to_dict(merged)


def compatible(engine: Engine, saved: Engines | None) -> tuple[dict[str, Mapping[str, Any]], str]:
    """The saved states that fit this policy, and the problem of the others or an empty string.

    A checkpoint stays usable after a change of the policy: the detectors restart their warm-up.
    """
    fit: dict[str, Mapping[str, Any]] = {}
    problem = ""
    for name, state in (saved or {}).items():
        try:
            engine.from_dict(state)
        except StateError as error:
            problem = f"the detectors of {name} restart their warm-up: {error}"
        else:
            fit[name] = state
    return fit, problem
