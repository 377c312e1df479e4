"""What is tried next where earlier weights are better: a pure function of what was tried.

A rollback that changes nothing is harmless by construction: the run repeats its own steps. Whatever
it changes is a trial. If the trouble comes back after all trials, they are undone: the program
itself causes the trouble, for example by a learning rate that it raises on purpose.

`limit_rates` says which learning rates follow a rollback: a pure function of rates and engine
states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from healcore.core.engine import Engine, EngineState
from healcore.core.numerics import FLOAT32_MAX
from healcore.runtime.driver import Engines, Rates
from healcore.runtime.run.healthy_ranges import RATE_TOLERANCE, HealthyValues

MAX_HOLDS = 2
"""Trials that hold what is unusual, for one trouble. The second one also withholds the updates of
the steps around the onset: their gradients may be wrong without an unusual norm or batch, as with
flipped signs."""


MAX_ACCEPTED = 3
"""Troubles accepted in a row. After that a verdict is only an alert."""


class Trial(StrEnum):
    """What a run changes when it repeats the steps of a place. Checkpoints hold the values.

    `next_trial` says in which order the trials are tried, and how often: each trial costs the
    repeat of some steps.
    """

    LIMIT_RATE = "rate"  # the learning rate is limited to the last healthy rate
    REPEAT = "repeat"  # nothing: damage by a bit flip or a faulty device does not come back
    HOLD = "hold"  # what was outside of its healthy range is held in it
    ACCEPT = "accept"  # the trials are undone; no later rollback is for this trouble


class TroubleFacts(NamedTuple):
    """What is known about the trouble that a comparison of weights has found.

    `next_trial` decides by these facts alone, so that it can be tested without a run.
    """

    rates: Sequence[Mapping[str, float]]
    """Learning rates in force at the comparisons that found the trouble, each by engine name; empty
    if they are unknown."""
    healthy_rates: Mapping[str, float]
    """Engine name -> highest rate at which the run was healthy, where it is known."""
    from_start: bool
    """Whether the better weights are the first of the run, so that no rate is known as healthy."""
    unusual: bool
    """Whether anything is unusual at the trouble that no trial has held yet."""
    may_limit: int
    """Number of times that the rate may be limited at one place, by the policy."""

    @property
    def has_higher_rate(self) -> bool:
        """Whether a rate at the trouble was above every healthy rate of its engine.

        A rate without a known healthy rate counts as higher. Rates that differ by less than
        `RATE_TOLERANCE` are equal. If no rate was higher, a limit of the rate would change nothing.
        """
        for rates in self.rates:
            for name, rate in rates.items():
                if rate > self.healthy_rates.get(name, 0.0) * RATE_TOLERANCE:
                    return True
        return False


def next_trial(tried: Sequence[Trial], facts: TroubleFacts) -> Trial:
    """The next trial for a trouble where `tried` has not helped.

    The first of these whose condition holds:

    1. Limit the rate if it is above every healthy rate, or if the better weights are the run's
       first.
    2. Repeat once with nothing changed.
    3. Hold what left its healthy range: numbers of the optimizers, gradient norms, batches whose
       loss the better weights find unusual. A second hold adds what is newly unusual, and withholds
       the updates of these steps.
    4. Limit a rate that is unknown, because nothing that is known has helped.
    5. Undo the trials.

    Args:
        tried: the trials so far for this trouble, oldest first.
        facts: what is known about it.

    Returns:
        The trial. Each call with one more entry in `tried` comes closer to `Trial.ACCEPT`, so a
        trouble has a bounded number of rollbacks: the limits of the rate, one repeat and
        `MAX_HOLDS`.

    Examples:
        >>> facts = TroubleFacts([{"": 0.1}], {"": 0.1}, False, unusual=False, may_limit=2)
        >>> next_trial([], facts)
        <Trial.REPEAT: 'repeat'>
        >>> next_trial([Trial.REPEAT], facts)
        <Trial.ACCEPT: 'accept'>
    """
    may_limit = tried.count(Trial.LIMIT_RATE) < facts.may_limit
    if may_limit and (facts.from_start or facts.has_higher_rate):
        return Trial.LIMIT_RATE
    if not tried:
        return Trial.REPEAT
    if facts.unusual and tried.count(Trial.HOLD) < MAX_HOLDS:
        return Trial.HOLD
    if may_limit and not facts.rates:
        return Trial.LIMIT_RATE
    return Trial.ACCEPT


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
            known[name] = np.float32(min(rate, FLOAT32_MAX))
    if at_fault is not None:
        last_healthy = _last_healthy(states, known, rates, learnt) if healthy else {}
        for name, limit in _new_limits(engine, states, at_fault, last_healthy).items():
            limited = engine.limit_lr(states[name], np.float32(limit), known.get(name), xp=np)
            states[name] = limited
    limits: dict[str, float] = {}
    for name in states:
        if name not in known:
            continue
        states[name] = engine.apply_rate(states[name], known[name], xp=np)
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


def _last_healthy(
    states: Mapping[str, EngineState],
    known: Mapping[str, np.float32],
    rates: Rates,
    learnt: HealthyValues,
) -> dict[str, float]:
    """Engine name -> the last healthy rate in force, where it is known and not 0."""
    found = {}
    for name in known:
        rate = rates[name]
        if rate:
            found[name] = learnt.healthy_rate(name, rate * float(states[name].lr.scale))
    return found


def _new_limits(
    engine: Engine,
    states: Mapping[str, EngineState],
    at_fault: Mapping[str, float],
    last_healthy: Mapping[str, float],
) -> dict[str, float]:
    """Engine name -> the rate to which a rollback limits it.

    The engines whose rate at the fault was above their last healthy rate; or, if there is no such
    engine, all of them.
    """
    lower = {name: rate for name, rate in last_healthy.items() if rate < at_fault[name]}
    if lower:
        return lower
    factor = float(engine.config.lr.factor)
    return {name: factor * at_fault[name] for name in states}
