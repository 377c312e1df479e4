"""The engine state to go on with after going back. Framework-neutral: dicts in, dicts out.

Detectors come from the checkpoint, so that the run is judged by what it knew then. Budgets and the
learning-rate multiplier come from the live run: restored with the rest, every rollback would give
back the attempt it has cost and undo the cut it came with (OPT-175B's logbook has both).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from healcore.core.engine import Engine, StateError

Engines = Mapping[str, Mapping[str, Any]]
"""Engine name -> `Engine.to_dict`."""


def gone_back(engine: Engine, live: Engines, saved: Engines | None) -> dict[str, dict[str, Any]]:
    """Engine states after a rollback.

    Args:
        engine: the policy's.
        live: the states at the moment of the rollback.
        saved: those of the checkpoint. One that it does not have warms up from nothing.

    Raises:
        StateError: a saved state is damaged or of another policy.
    """
    return {name: _merged(engine, now, (saved or {}).get(name)) for name, now in live.items()}


def cut_lr(engine: Engine, live: Engines, rate: float | None) -> dict[str, dict[str, Any]]:
    """Engine states after a cut of the learning rate, where the policy has one left.

    Args:
        engine: the policy's.
        live: the states now.
        rate: the schedule's learning rate; None: it is not known.
    """
    at = None if rate is None else np.float32(rate)
    return {
        name: engine.to_dict(engine.cut_lr(engine.from_dict(now), at, xp=np))
        for name, now in live.items()
    }


def tried_again(engine: Engine, live: Engines, saved: Engines) -> dict[str, dict[str, Any]]:
    """Engine states for seeing whether the same happens again: all as it was then.

    Learning rate and incidents too, and what the order has cost is given back: if it happens again,
    the engine orders the same again, and then it counts.
    """
    states = {}
    for name, then in saved.items():
        now, start = engine.from_dict(live[name]).budget, engine.init().budget
        budget = now._replace(
            recoveries=np.minimum(now.recoveries + 1, start.recoveries),
            lr_cuts=np.minimum(now.lr_cuts + 1, start.lr_cuts),
        )
        states[name] = engine.to_dict(engine.from_dict(then)._replace(budget=budget))
    return {**gone_back(engine, live, saved), **states}


def _merged(
    engine: Engine, live: Mapping[str, Any], saved: Mapping[str, Any] | None
) -> dict[str, Any]:
    now = engine.from_dict(live)
    then = engine.init(groups=live["groups"]) if saved is None else engine.from_dict(saved)
    return engine.to_dict(engine.on_rollback(now, then, xp=np))


def readable(engine: Engine, saved: Engines | None) -> tuple[dict[str, Mapping[str, Any]], str]:
    """Those of the saved states that this policy can go on from, and what is wrong with the rest.

    A policy may have been edited since the checkpoint was written. That must not make it useless:
    the detectors then begin anew, and it is said.
    """
    fit: dict[str, Mapping[str, Any]] = {}
    wrong = ""
    for name, state in (saved or {}).items():
        try:
            engine.from_dict(state)
        except StateError as error:
            wrong = f"the detectors of {name} begin anew: {error}"
        else:
            fit[name] = state
    return fit, wrong
