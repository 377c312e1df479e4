"""What of the engine a recorded curve can judge: which steps are skipped, where it goes back.

What a policy clips, how far it cuts the learning rate and what its budget pays for change nothing
in a curve that is already recorded. What is left are the detectors that some rule acts on, those
rules and the incident (a cut that is due takes a rollback along): the same functions of the core in
the same order as in `healcore.core.engine.judge`, less the rest, so that thousands of variants cost
little. Each rule reads only the detectors that it listens to: what does not depend on the varied
numbers (the window of the non-finite rule, say) stays one value for all variants. tests/sweep holds
every order and every skip equal to those of the whole engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from healcore.core.detectors import CAUSES, DETECTORS
from healcore.core.engine import EngineConfig, incident, rules, skipping
from healcore.core.signals import Signals, observe
from healcore.core.verdict import Action, Cause, Reading

_NONFINITE = int(Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD)
_ACTS = int(Action.ROLLBACK | Action.CUT_LR | Action.STOP)


class Watch(NamedTuple):
    """The engine's memory, as far as it matters here."""

    step: Any
    """int32: steps judged."""
    detectors: tuple[Any, ...]
    rules: tuple[rules.RuleState, ...]
    skips: Any
    """int32: finite steps skipped in a row."""
    incident: incident.IncidentState


class Verdict(NamedTuple):
    """One step. Bools."""

    order: Any
    """A recovery is due, whether the budget still pays for it or not."""
    first: Any
    """It is the first of its incident. A recorded curve does not heal: on it the order is repeated
    every `incident.patience` alarms, where a live run has gone back once."""
    skip: Any


def trimmed(config: EngineConfig) -> EngineConfig:
    """The policy without what changes neither an order nor a skip."""
    trouble = _trouble(config)
    return config._replace(
        clip=None,
        detectors=tuple(
            (name, each) for name, each in config.detectors if int(CAUSES[name]) & trouble
        ),
        rules=tuple(rule for rule in config.rules if rule.skip or rule.action & _ACTS),
    )


def init(config: EngineConfig) -> Watch:
    """Before the first step, as NumPy arrays."""
    none = np.zeros((), np.int32)
    return Watch(
        step=none,
        detectors=tuple(DETECTORS[name].init(each) for name, each in config.detectors),
        rules=tuple(rules.init(rule) for rule in config.rules),
        skips=none.copy(),
        incident=incident.init(),
    )


def step(
    config: EngineConfig, state: Watch, signals: Signals, resumed: Any, *, xp: Any
) -> tuple[Watch, Verdict]:
    """Judges one step.

    Args:
        config: from `trimmed`; its numbers may be arrays.
        state: from `init` or the previous step.
        signals: what the step logged: a loss or a gradient norm at least.
        resumed: bool array, the run goes on from a checkpoint here: an open incident is closed.
        xp: the array namespace.
    """
    seen = observe(signals, resumed != resumed, xp=xp)
    memories, readings = [], {}
    for (name, thresholds), memory in zip(config.detectors, state.detectors, strict=True):
        module = DETECTORS[name]
        if all(getattr(seen, field) is not None for field in module.NEEDS):
            memory, readings[name] = module.update(thresholds, memory, seen, xp=xp)
        memories.append(memory)

    never = resumed != resumed
    wished = recovery = cuts = never
    remembered = []
    for rule, memory in zip(config.rules, state.rules, strict=True):
        hit = _heard(readings, rule.causes, rule.sustained, never)
        quiet = config.incident.quiet_steps
        watched, firing = rules.update(rule, memory, hit, state.step, quiet, xp=xp)
        remembered.append(watched._replace(age=memory.age))
        if rule.skip:
            wished = wished | firing.fired
        if rule.action & Action.ROLLBACK:
            recovery = recovery | firing.fired
        if rule.action & Action.CUT_LR:
            cuts = cuts | firing.fired

    skips, skip = skipping.update(config.max_skips, state.skips, wished, seen, xp=xp)
    trouble = _trouble(config)
    alarm = _heard(readings, trouble, False, never) | _heard(readings, trouble, True, never)
    before = state.incident
    before = before._replace(open=before.open & ~resumed, quiet=xp.where(resumed, 0, before.quiet))
    after, wanted = incident.update(
        config.incident, config.rollback, before, state.step, alarm, recovery, cuts, xp=xp
    )
    first = wanted.recover & ((before.recovered < 0) | (alarm & ~before.open))
    # What nothing here reads stays as it was, and costs nothing in a compiled loop.
    after = after._replace(
        number=before.number,
        onset=before.onset,
        last_onset=before.last_onset,
        escalations=before.escalations,
    )
    watch = Watch(state.step + 1, tuple(memories), tuple(remembered), skips, after)
    return watch, Verdict(wanted.recover, first, skip)


def _heard(readings: Mapping[str, Reading], causes: int, sustained: bool, never: Any) -> Any:
    """Whether one of `causes` is among this step's alarms, or among what is sustained."""
    heard = never
    for name, reading in readings.items():
        if int(CAUSES[name]) & causes:
            told = reading.sustained if sustained else reading.alarm
            heard = heard | (told & ((reading.cause & causes) != 0))
    return heard


def _trouble(config: EngineConfig) -> int:
    """Causes that open an incident: those that some rule acts on."""
    mask = _NONFINITE
    for rule in config.rules:
        if rule.skip or rule.action & _ACTS:
            mask |= rule.causes
    return mask
