"""`limit_rates`: which learning rates follow a rollback, by rates and engine states alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from healcore.core.array_namespace import FLOAT32_MAX
from healcore.core.engine import Engine
from healcore.runtime.driver import Engines, Rates
from healcore.runtime.run.healthy_ranges import HealthyValues


class RatesAfterRollback(NamedTuple):
    """The engine states after a rollback, and the numbers that its event reports.

    `limit_rates` computes it from the states of the checkpoint and the order. Nothing is changed
    before the driver loads `engines`.
    """

    engines: Engines
    """Engine name -> its state, as JSON-safe values."""
    limits: dict[str, float]
    """Engine name -> upper limit of its learning rate, as far as it is known and set."""
    scales: dict[str, float]
    """Engine name -> multiplier of its learning rate at the restored step, in (0, 1]."""


def limit_rates(
    engine: Engine,
    engines: Engines,
    at_fault: Mapping[str, float] | None,
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
        at_fault: learning rates in force at the fault, or the multiplier where it is unknown; None
            for no new limit.
        rates: at the restored step.
        healthy: whether steps before the restored step were trained at `rates`.
        learnt: rates at which the run was healthy. They count where the rate at the restored step
            is above them all: a scheduler may have set the wrong rate before the checkpoint.

    Returns:
        The states with their limits and multipliers.
    """
    states = {name: engine.from_dict(state) for name, state in engines.items()}
    known: dict[str, np.float32] = {}  # rates at the restored step that the engine can limit
    for name, rate in rates.items():
        if rate is not None and engine.limits_lr and name in states:
            # A rate beyond float32 counts as unknown. Without the limit NumPy would warn of it.
            known[name] = np.float32(min(rate, FLOAT32_MAX))
    if at_fault is not None:
        factor = float(engine.config.lr.factor)
        new = {name: factor * at_fault[name] for name in states}
        lower: dict[str, float] = {}
        for name in known if healthy else ():
            in_force = float(rates[name] or 0) * float(states[name].lr.scale)
            last_healthy = learnt.healthy_rate(name, in_force)
            if 0 < last_healthy < at_fault[name]:
                lower[name] = last_healthy
        for name, limit in (lower or new).items():
            limited = engine.limit_lr(states[name], np.float32(limit), known.get(name))
            states[name] = limited
    limits: dict[str, float] = {}
    for name in states:
        if name not in known:
            continue
        states[name] = engine.apply_rate(states[name], known[name])
        lr = states[name].lr
        if lr.hold:
            limit = float(lr.rate_after_cut)
        else:
            limit = float(engine.config.lr.ceiling * lr.rate_at_cut)
        if limit > 0:
            limits[name] = limit
    scales = {name: float(state.lr.scale) for name, state in states.items()}
    saved = {name: engine.to_dict(state) for name, state in states.items()}
    return RatesAfterRollback(saved, limits, scales)
