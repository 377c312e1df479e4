"""Which learning rates follow a rollback: a pure function of rates and engine states."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from healcore.core.engine import Engine
from healcore.runtime.driver import Engines, Rates
from healcore.runtime.run.healthy_ranges import HealthyValues


def limit_rates(
    engine: Engine,
    engines: Engines,
    at_fault: Mapping[str, float] | None,
    rates: Rates,
    *,
    healthy: bool,
    learnt: HealthyValues,
) -> tuple[Engines, dict[str, float], dict[str, float]]:
    """Engine states with learning rates that fit the schedule at the restored step.

    With `at_fault`, and if the policy has a cut left, each optimizer whose rate at the fault was
    above its last healthy rate is limited to that rate. If no such rate is known, the limit of each
    is the policy's factor times the rate at the fault. A multiplier stays as it is if the rate is
    unknown, or if the policy's cuts do not depend on it.

    Args:
        engine: engine of the policy.
        engines: states after the rollback, with the multipliers of the live run.
        at_fault: learning rates in force at the fault, or the multiplier where it is unknown; None
            for no new limit.
        rates: at the restored step.
        healthy: whether steps before the restored step were trained at `rates`.
        learnt: rates at which the run was healthy. They count where the rate at the restored step
            is above them all: a scheduler may have set the wrong rate before the checkpoint.

    Returns:
        The states, the limits of the learning rates as far as they are known and set, and the
        multipliers.
    """
    states = {name: engine.from_dict(state) for name, state in engines.items()}
    known = {name: np.float32(rate) for name, rate in rates.items() if rate is not None}
    at = {name: known.get(name) if engine.limits_lr else None for name in states}
    if at_fault is not None:
        usable = {n: rate for n, rate in rates.items() if healthy and rate and at[n] is not None}
        before = {
            name: learnt.healthy_rate(name, rate * float(states[name].lr.scale))
            for name, rate in usable.items()
        }
        factor = float(engine.config.lr.factor)
        lower = {name: rate for name, rate in before.items() if rate < at_fault[name]}
        for name, limit in (lower or {n: factor * at_fault[n] for n in states}).items():
            states[name] = engine.limit_lr(states[name], np.float32(limit), at[name], xp=np)
    limits = dict[str, float]()
    for name, rate in at.items():
        if rate is not None:
            states[name] = engine.apply_rate(states[name], rate, xp=np)
            lr, ceiling = states[name].lr, engine.config.lr.ceiling
            limits[name] = float(lr.rate_after_cut if lr.hold else ceiling * lr.rate_at_cut)
    scales = {name: float(state.lr.scale) for name, state in states.items()}
    set_limits = {name: limit for name, limit in limits.items() if limit > 0}
    return {n: engine.to_dict(state) for n, state in states.items()}, set_limits, scales
