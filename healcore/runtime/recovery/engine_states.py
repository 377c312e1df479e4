"""The engine state to continue with after a rollback. Framework-neutral: dicts in, dicts out.

Detectors come from the checkpoint, so that they judge the run by the history before it. Budgets and
the learning-rate multiplier come from the live run: restoring them too would refund the attempt
that a rollback has used and undo its learning-rate cut (OPT-175B's logbook has both).
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
    """Engine states after a rollback; an engine without a saved state starts its warm-up again.

    `counted`: `live` has the rollback in its budget already, and goes to an older checkpoint.
    """
    then = saved or {}
    return {name: _merged(engine, now, then.get(name), counted) for name, now in live.items()}


def limited(
    engine: Engine, engines: Engines, broken: float, rate: float | None, *, healthy: bool
) -> dict[str, dict[str, Any]]:
    """Engine states with a limit on the learning rate, if the policy has a cut left.

    The limit is the last healthy rate. If this rate is unknown, or not lower than the rate at which
    the run broke, the limit is the policy's share of the broken rate.

    Args:
        engine: of the policy.
        engines: the states after the rollback, with the multipliers of the live run.
        broken: learning rate in force at which the run broke; the multiplier if it is unknown.
        rate: the schedule's rate at the restored step, or None if it is unknown.
        healthy: steps before the restored one have been trained at that rate.
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


def without_limit(engine: Engine, engines: Engines) -> dict[str, dict[str, Any]]:
    """Engine states with the full learning rate."""
    return {
        name: engine.to_dict(engine.lift_limit(engine.from_dict(each), xp=np))
        for name, each in engines.items()
    }


def at_rate(
    engine: Engine, engines: Engines, rate: float | None
) -> tuple[dict[str, dict[str, Any]], float | None, float]:
    """Engine states for the restored rate of the schedule, the limit, and the multiplier.

    The multipliers stay as they are if the rate is unknown (None), or the policy's cuts do not
    depend on it. The limit is None then, and without a limit. The multiplier is the smallest of all
    engines.
    """
    rate = rate if engine.limits_lr else None
    states = {name: engine.from_dict(each) for name, each in engines.items()}
    if rate is not None:
        at = np.float32(rate)
        states = {name: engine.at_rate(each, at, xp=np) for name, each in states.items()}
    ceiling = engine.config.lr.ceiling
    limits = [
        float(each.lr.low if each.lr.hold else ceiling * each.lr.broken) for each in states.values()
    ]
    limit = min((each for each in limits if each > 0), default=None)
    scale = min((float(each.lr.scale) for each in states.values()), default=1.0)
    found = {name: engine.to_dict(each) for name, each in states.items()}
    return found, None if rate is None else limit, scale


def for_rerun(engine: Engine, live: Engines, saved: Engines) -> dict[str, dict[str, Any]]:
    """Engine states for a re-run with nothing changed: all as in the checkpoint.

    That includes learning rate and incidents. The cut that the order has used is refunded: if the
    trouble recurs, the engine gives the same order and uses its budget then.
    """
    states = {}
    for name, then in saved.items():
        now, start = engine.from_dict(live[name]).budget, engine.init().budget
        budget = now._replace(lr_cuts=np.minimum(now.lr_cuts + 1, start.lr_cuts))
        states[name] = engine.to_dict(engine.from_dict(then)._replace(budget=budget))
    return {**after_rollback(engine, live, saved), **states}


def _merged(
    engine: Engine, live: Mapping[str, Any], saved: Mapping[str, Any] | None, counted: bool
) -> dict[str, Any]:
    now = engine.from_dict(live)
    then = engine.init(groups=live["groups"]) if saved is None else engine.from_dict(saved)
    merged = engine.on_rollback(now, then, xp=np)
    if counted:
        merged = merged._replace(budget=now.budget, tally=now.tally)
    return engine.to_dict(merged)


def compatible(engine: Engine, saved: Engines | None) -> tuple[dict[str, Mapping[str, Any]], str]:
    """The saved states that fit this policy, and what is wrong with the others.

    A checkpoint stays usable when the policy is edited; the detectors start their warm-up again.
    """
    fit: dict[str, Mapping[str, Any]] = {}
    problem = ""
    for name, state in (saved or {}).items():
        try:
            engine.from_dict(state)
        except StateError as error:
            problem = f"the detectors of {name} start their warm-up again: {error}"
        else:
            fit[name] = state
    return fit, problem
