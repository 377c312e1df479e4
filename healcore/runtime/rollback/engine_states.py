"""The engine state to continue with after a rollback. Framework-neutral: dicts in, dicts out.

Detectors come from the checkpoint, so that they judge the run by the history before it. Budgets and
the learning-rate multiplier come from the live run: restoring them too would refund the attempt
that a rollback has used and undo its learning-rate cut (OPT-175B's logbook has both).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from healcore.core.detectors import instability
from healcore.core.engine import Engine, StateError

Engines = Mapping[str, Mapping[str, Any]]
"""Engine name -> `Engine.to_dict`."""


def after_rollback(
    engine: Engine, live: Engines, saved: Engines | None
) -> dict[str, dict[str, Any]]:
    """Engine states after a rollback; an engine without a saved state starts its warm-up again."""
    return {name: _merged(engine, now, (saved or {}).get(name)) for name, now in live.items()}


def cut_lr(engine: Engine, live: Engines, rate: float | None) -> dict[str, dict[str, Any]]:
    """Engine states after a cut of the schedule's learning rate, if the policy has one left."""
    at = None if rate is None or not engine.limits_lr else np.float32(rate)
    return {
        name: engine.to_dict(engine.cut_lr(engine.from_dict(now), at, xp=np))
        for name, now in live.items()
    }


class LearningRate(NamedTuple):
    """The learning rate before and after a rollback."""

    schedule: float | None
    """The schedule's at the step where it began, without the multiplier; None: not known."""
    limit: float | None
    """What is not exceeded from now on; None: no cut limits it, or it is not known."""
    scale: float
    """The multiplier at the restored step, the smallest of all engines."""


def at_rate(
    engine: Engine, engines: Engines, rate: float | None, *, before: float | None
) -> tuple[dict[str, dict[str, Any]], LearningRate]:
    """Engine states for the restored rate of the schedule, which was `before`.

    The multipliers stay as they are if the rate is not known (None), or the policy's cuts do not
    depend on it.
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
    return {name: engine.to_dict(each) for name, each in states.items()}, LearningRate(
        schedule=before,
        limit=None if rate is None else limit,
        scale=min((float(each.lr.scale) for each in states.values()), default=1.0),
    )


def lr_raised(engine: Engine, engines: Engines) -> bool:
    """Whether the schedule has just raised the learning rate, or it is not known if it has."""
    names = [name for name, _ in engine.config.detectors]
    for each in engines.values():
        state = engine.from_dict(each)
        detector = dict(zip(names, state.detectors, strict=True)).get("instability")
        if detector is None or not 0 < state.lr.rate <= instability.RAISED * detector.rate:
            return True
    return False


def for_rerun(engine: Engine, live: Engines, saved: Engines) -> dict[str, dict[str, Any]]:
    """Engine states for a re-run with nothing changed: all as in the checkpoint.

    That includes learning rate and incidents. The budget that the order has used is refunded: if
    the trouble happens again, the engine orders the same again and uses its budget then.
    """
    states = {}
    for name, then in saved.items():
        now, start = engine.from_dict(live[name]).budget, engine.init().budget
        budget = now._replace(
            recoveries=np.minimum(now.recoveries + 1, start.recoveries),
            lr_cuts=np.minimum(now.lr_cuts + 1, start.lr_cuts),
        )
        states[name] = engine.to_dict(engine.from_dict(then)._replace(budget=budget))
    return {**after_rollback(engine, live, saved), **states}


def _merged(
    engine: Engine, live: Mapping[str, Any], saved: Mapping[str, Any] | None
) -> dict[str, Any]:
    now = engine.from_dict(live)
    then = engine.init(groups=live["groups"]) if saved is None else engine.from_dict(saved)
    return engine.to_dict(engine.on_rollback(now, then, xp=np))


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
