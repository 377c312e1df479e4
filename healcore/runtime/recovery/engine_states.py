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
    merged = {}
    for name, each in live.items():
        now, then = engine.from_dict(each), (saved or {}).get(name)
        before = engine.init(groups=each["groups"]) if then is None else engine.from_dict(then)
        state = engine.on_rollback(now, before, xp=np)
        if counted:
            state = state._replace(budget=now.budget, tally=now.tally)
        merged[name] = engine.to_dict(state)
    return merged


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
    at = _rate_at(engine, rate)
    states = {}
    for name, each in engines.items():
        state = engine.from_dict(each)
        before = rate * float(state.lr.scale) if healthy and rate and at is not None else broken
        limit = before if before < broken else broken * float(engine.config.lr.factor)
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
    at = _rate_at(engine, rate)
    states = {name: engine.from_dict(each) for name, each in engines.items()}
    limits: list[float] = []
    if at is not None:
        states = {name: engine.apply_rate(each, at, xp=np) for name, each in states.items()}
        rates = [each.lr for each in states.values()]
        ceiling = engine.config.lr.ceiling
        limits = [float(each.low if each.hold else ceiling * each.broken) for each in rates]
    limit = min((each for each in limits if each > 0), default=None)
    scale = min((float(each.lr.scale) for each in states.values()), default=1.0)
    return {name: engine.to_dict(each) for name, each in states.items()}, limit, scale


def _rate_at(engine: Engine, rate: float | None) -> np.float32 | None:
    """The schedule's rate if the policy's cuts depend on the rate, or None."""
    return np.float32(rate) if engine.limits_lr and rate is not None else None


def compatible(engine: Engine, saved: Engines) -> tuple[dict[str, Any], str]:
    """The saved states that fit this policy, and the problem of the others or an empty string.

    A checkpoint stays usable after a change of the policy: the detectors restart their warm-up.
    """
    fit: dict[str, Any] = {}
    problem = ""
    for name, state in saved.items():
        try:
            engine.from_dict(state)
            fit[name] = state
        except StateError as error:
            problem = f"the detectors of {name} restart their warm-up: {error}"
    return fit, problem
