"""Orders as values: what a run answers to trouble, which checkpoint it restores, what it tries.

Pure functions. Steps are counted from 0. A checkpoint of step n holds the state that step n starts
from, so a checkpoint of the onset's step holds the last state before the trouble.

A rollback that changes nothing is harmless by construction: the run repeats its own steps. A change
of the rate or the data is a trial. If the trouble comes back after all trials, they are undone: the
program means what it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field

from healcore.core.decision import Action
from healcore.core.engine import Engine, StateError
from healcore.runtime.data import BatchId
from healcore.runtime.store.saved import NoGoodCheckpoint, Saved

Step = Annotated[int, Field(ge=0)]
MAX_LEFT_OUT = 2
"""Trials that leave out steps at one place."""
MAX_ACCEPTED = 3
"""Places accepted one after another; then a verdict only alerts."""
RATE_TOLERANCE = 1.0001
"""A rate is above another from this ratio on: two float32 computations of one rate differ less."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """An order to the host: to save, to stop or to roll back (`action`)."""

    __pydantic_config__ = ConfigDict(extra="ignore")

    index: int  # step whose records led to the order
    onset: int  # step of the first alarm of the trouble
    since: int = -1  # step of the first alarm with one of the causes, not before `onset`
    action: int = int(Action.ROLLBACK)  # `Action` flags
    cause: int = 0  # `Cause` flags
    depth: int = 1  # known-good checkpoint to restore: 1 is the newest before the onset
    batches: tuple[BatchId, ...] = ()  # to skip when the run repeats the steps
    exact: bool = False  # whether the state is known to be sound up to `onset`
    forced: bool = False  # given by a hook, the state check or better weights, not by the engine
    arrays: tuple[str, ...] = ()  # names of arrays with NaN or Inf, if a save led to the order
    better: int | None = None  # step of the better earlier weights to restore, or None
    lr_at_fault: Mapping[str, float] | None = None
    """Engine name -> learning rate in force that caused the trouble; None if the rollback sets no
    limit. Without an entry it is the current rate, or the multiplier alone if that is unknown."""
    trial: str = ""  # what the run tries for better earlier weights, see `Trial`, or empty
    read_again: tuple[BatchId, ...] = ()  # left out by earlier trials
    lr_states: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Engine name -> its learning-rate state before a trial of the rate; restored by `accept`."""


@dataclass(frozen=True, kw_only=True)
class RollbackRecord(Order):
    """A rollback that was carried out."""

    number: int = 0  # of the rollback, from 1 over the whole run
    step: int = 0  # steps done when the rollback began
    target: Step = 0  # step of the restored checkpoint
    skipped: int = 0  # number of skipped batches
    engine: str = ""  # the optimizer of the next three: with the lowest multiplier, and a limit
    lr: float | None = None  # the schedule's rate when it began, or None if unknown
    lr_limit: float | None = None  # upper limit of the rate, or None without a limit or if unknown
    lr_scale: float = 1.0  # the multiplier at `target`: 1 where the schedule is below the limit

    def outline(self) -> RollbackRecord:
        """A copy for the ledger: only the batches of a trial are needed, to undo the trial."""
        return self if self.trial else replace(self, batches=())


def choose(
    saves: Sequence[Saved],
    *,
    onset: int,
    depth: int = 1,
    tried: Sequence[int] = (),
    initial: Sequence[int] = (),
    exact: bool = False,
) -> tuple[int, ...]:
    """Chooses a known-good checkpoint, or as a last resort an initial one.

    Returns the steps to try: the choice, then older ones in case it is damaged.

    Args:
        saves: the checkpoints.
        onset: step of the incident's first alarm.
        depth: 1 for the newest known-good checkpoint before the onset, 2 for the next older one.
        tried: steps of the checkpoints that were restored for the same trouble. The choice is
            older, because newer known-good checkpoints lead into the same trouble.
        initial: steps of the snapshot that the run began with, and of the checkpoint that this
            process resumed from, which need not be known-good.
        exact: whether the state is known to be sound up to the onset, or its weights have been
            compared. Then each finite checkpoint up to the onset can be restored.

    Raises:
        NoGoodCheckpoint: there is no such checkpoint.
    """
    usable = [save for save in saves if save.finite and save.step <= onset]
    known_good = {save.step for save in usable if save.status == "good"}
    candidates = {save.step for save in usable if save.status == "candidate"}
    good = sorted(known_good | candidates if exact else known_good, reverse=True)
    choices = good + sorted(candidates & {*initial} - {*good}, reverse=True)
    if not choices:
        listed = [f"{s.step} ({s.status if s.finite else 'not finite'})" for s in saves[-5:]]
        raise NoGoodCheckpoint(
            f"no known-good checkpoint from before the onset at step {onset}, and no initial "
            f"snapshot; there: {', '.join(listed) or 'none, and a rollback needs a store'}"
        )
    older = [step for step in choices if step < min(tried, default=onset + 1)]
    start = min(max(depth, 1), len(good) or 1) - 1
    chosen = choices[start]
    if tried and chosen >= min(tried):
        chosen = older[0] if older else min(choices)
    return tuple(step for step in choices if step <= chosen)


class Trial(StrEnum):
    """What a run changes when it repeats the steps of a place."""

    RATE = "rate"  # the learning rate is limited to the last healthy rate
    REPEAT = "repeat"  # nothing: damage by a bit flip or a faulty device does not come back
    LEAVE_OUT = "leave_out"  # the unusual steps at the onset are left out
    ACCEPT = "accept"  # what was tried is undone, and the trouble is never rolled back again


class Facts(NamedTuple):
    """What is known about the trouble."""

    rates: Sequence[Mapping[str, float]]  # in force at the comparisons that found it, if known
    healthy_rates: Mapping[str, float]  # highest rates at which the run was healthy, if known
    from_start: bool  # whether the better weights are the first of the run
    unusual_steps: bool  # whether a step at the onset has an unusual batch or norm
    may_limit: int  # number of times that the rate may be limited at one place
    can_rewind: bool  # whether the data can be rewound


def decide(tried: Sequence[Trial], facts: Facts) -> Trial:
    """The next trial at a place where `tried` has not helped, in this order.

    * The rate is above every healthy rate, or the better weights are the first of the run: limit
      it. An unknown rate is limited after a repeat that has not helped.
    * Repeat once with nothing changed.
    * Leave out what is unusual at the onset, at most `MAX_LEFT_OUT` times.
    * Undo what was tried, and accept.
    """
    healthy = facts.healthy_rates
    higher = (
        r > healthy.get(n, 0.0) * RATE_TOLERANCE for rates in facts.rates for n, r in rates.items()
    )
    raised = any(higher) if facts.rates else bool(tried)
    if (raised or facts.from_start) and tried.count(Trial.RATE) < facts.may_limit:
        return Trial.RATE
    if not tried:
        return Trial.REPEAT
    if facts.unusual_steps and facts.can_rewind and tried.count(Trial.LEAVE_OUT) < MAX_LEFT_OUT:
        return Trial.LEAVE_OUT
    return Trial.ACCEPT


Engines = Mapping[str, Mapping[str, Any]]
"""Engine name -> `Engine.to_dict`."""
Rates = Mapping[str, float | None]
"""Engine name -> the schedule's learning rate, or None if it is unknown."""


def after_rollback(
    engine: Engine, live: Engines, saved: Engines | None
) -> dict[str, dict[str, Any]]:
    """Engine states after a rollback. An engine without a saved state restarts its warm-up."""
    merged = {}
    for name, state in live.items():
        now, then = engine.from_dict(state), (saved or {}).get(name)
        before = engine.init(groups=state["groups"]) if then is None else engine.from_dict(then)
        merged[name] = engine.to_dict(engine.on_rollback(now, before, xp=np))
    return merged


def limited(
    engine: Engine,
    engines: Engines,
    at_fault: Mapping[str, float] | None,
    rates: Rates,
    *,
    healthy: bool,
) -> tuple[dict[str, dict[str, Any]], dict[str, float], dict[str, float]]:
    """Engine states with learning rates that fit the schedule at the restored step.

    With `at_fault`, and if the policy has a cut left, each optimizer whose rate at the fault was
    higher is limited to its last healthy rate. If no such rate is known, the limit of each is the
    policy's factor times the rate at the fault. A multiplier stays as it is if the rate is unknown,
    or if the policy's cuts do not depend on it.

    Args:
        engine: engine of the policy.
        engines: states after the rollback, with the multipliers of the live run.
        at_fault: learning rates in force at the fault, or the multiplier where it is unknown; None
            for no new limit.
        rates: at the restored step.
        healthy: whether steps before the restored step were trained at `rates`.

    Returns:
        The states, the limits of the learning rates as far as they are known and set, and the
        multipliers.
    """
    states = {name: engine.from_dict(state) for name, state in engines.items()}
    at = {name: _rate_at(engine, rates.get(name)) for name in states}
    if at_fault is not None:
        before = {
            name: rate * float(states[name].lr.scale)
            for name, rate in rates.items()
            if healthy and rate and at[name] is not None
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
            limits[name] = float(lr.low if lr.hold else ceiling * lr.broken)
    scales = {name: float(state.lr.scale) for name, state in states.items()}
    set_limits = {name: limit for name, limit in limits.items() if limit > 0}
    return {n: engine.to_dict(state) for n, state in states.items()}, set_limits, scales


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


def _rate_at(engine: Engine, rate: float | None) -> np.float32 | None:
    """The schedule's rate if the policy's cuts depend on the rate, or None."""
    return np.float32(rate) if engine.limits_lr and rate is not None else None


def compatible(engine: Engine, saved: Engines) -> tuple[dict[str, Any], str]:
    """The saved states that fit this policy, and the problem of the others or an empty string.

    A checkpoint stays usable after a change of the policy: the detectors restart their warm-up.
    """
    fit, problem = {}, ""
    for name, state in saved.items():
        try:
            engine.from_dict(state)
            fit[name] = state
        except StateError as error:
            problem = f"the detectors of {name} restart their warm-up: {error}"
    return fit, problem
