"""`limit_rates`: which learning rates follow a rollback, by rates and engine states alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

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
    for name, rate in rates.items():
        if rate is not None and engine.limits_lr and name in engines:
            # A rate beyond float32 counts as unknown. Without the limit NumPy would warn of it.
            known[name] = np.float32(min(rate, FLOAT32_MAX))
    states = {name: engine.from_dict(state) for name, state in engines.items()}
    factor = float(engine.config.lr.factor)
    new = {name: factor * rate for name, rate in at_fault.items()}
    lower: dict[str, float] = {}
    for name in at_fault.keys() & known.keys() if healthy else ():
        in_force = float(rates[name] or 0) * float(states[name].lr.scale)
        last_healthy = learnt.healthy_rate(name, in_force)
        if 0 < last_healthy < at_fault[name]:
            lower[name] = last_healthy
    for name, limit in (lower or new).items():
        states[name] = engine.limit_lr(states[name], np.float32(limit), known.get(name))
    found = RatesAfterRollback({}, {}, {})
    for name, state in states.items():
        if name in known:
            state = engine.apply_rate(state, known[name])
            lr = state.lr
            limit = lr.rate_after_cut if lr.hold else engine.config.lr.ceiling * lr.rate_at_cut
            if limit > 0:
                found.limits[name] = float(limit)
        found.scales[name] = float(state.lr.scale)
        found.engines[name] = engine.to_dict(state)
    return found
