"""The adapter need "sweep_scan": many variants of a policy over recorded series (`healcore sweep`).

An adapter provides a `SweepScan` class, called with a config from `trimmed` and the varied places.

A recorded curve shows which steps are skipped and where a rollback is ordered. Clipping, the size
of a learning-rate cut and the budget change nothing in it. So `step` runs only the detectors that
some rule acts on, those rules and the incident (a due cut orders a rollback too), with the core's
functions in the order of `healcore.core.engine.judge`. Each rule reads only its own detectors, so
values that do not depend on the varied numbers stay single values for all variants.
tests/tools/sweep compares every order and skip with the whole engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from healcore.core.detectors import CAUSES, DETECTORS
from healcore.core.engine import EngineConfig, incident, rules, skip_limit
from healcore.core.signals import Signals, observe
from healcore.core.verdict import NONFINITE, Action, Reading
from healcore.plugins.rows import SignalLayout

WORD = 32
"""Rows of a group: the orders of a group are the bits of one word."""

Place = tuple[str | int, ...]
"""The path from an `EngineConfig` to a number: names of fields and detectors, indices of rules."""

_NONFINITE = int(NONFINITE)


class PackedRows(NamedTuple):
    """All rows of some series; those after the last group's are not judged."""

    signals: np.ndarray
    """float32 (rows, signals of the layout)."""
    kind: np.ndarray
    """int32 (rows,): which of the layout's combinations the row has."""
    resumed: np.ndarray
    """bool (rows,): the first row after the checkpoint that a resumed attempt continues from."""
    own: np.ndarray
    """bool (rows,): counts; false for rows of earlier attempts, which only update the state."""


class RowGroups(NamedTuple):
    """int32 or bool (groups,) each; a group without rows has `start == stop`."""

    start: np.ndarray
    stop: np.ndarray
    fresh: np.ndarray
    """A series begins here, with a new state."""


class PackedSeries(NamedTuple):
    """Series of one layout, packed for one call of a program; each begins a new group."""

    layout: SignalLayout
    rows: PackedRows
    groups: RowGroups
    which: tuple[int, ...]
    """Places of the series among all that were packed."""
    first: tuple[int, ...]
    """The group in which each begins."""


class SweepScan(Protocol):
    """The variants of one policy on one backend. Thread-safe."""

    def run(
        self, numbers: tuple[np.ndarray, ...], packed: PackedSeries
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Runs the variants over each series.

        Args:
            numbers: (variants,) for each varied place.
            packed: the series.

        Returns:
            uint32 (groups, variants): bit `j` is the order at the group's row `j`; and int32
            (groups, variants): skips, and first orders of incidents, of the group's own rows.
        """
        ...


class VariantState(NamedTuple):
    """The part of the engine's state that decides orders and skips."""

    step: Any
    """int32: steps judged."""
    detectors: tuple[Any, ...]
    rules: tuple[rules.RuleState, ...]
    skips: Any
    """int32: finite steps skipped in a row."""
    incident: incident.IncidentState


class VariantDecision(NamedTuple):
    """The decision about one step. Bools."""

    order: Any
    """A rollback is due, whether or not the budget still grants it."""
    first: Any
    """It is the first of its incident. A recorded curve does not heal, so the order repeats every
    `incident.patience` alarms, where a live run has gone back once."""
    skip: Any


def configure(config: EngineConfig, places: tuple[Place, ...], numbers: tuple[Any, ...]) -> Any:
    """The config with Python numbers or arrays at `places`."""
    for place, number in zip(places, numbers, strict=True):
        config = _put(config, place, number)
    return config


def _put(tree: Any, place: Place, number: Any) -> Any:
    if not place:
        return number
    head, rest = place[0], place[1:]
    if isinstance(head, int):
        return tuple(_put(each, rest, number) if i == head else each for i, each in enumerate(tree))
    if head == "detectors":
        name = rest[0]
        return tree._replace(
            detectors=tuple(
                (own, _put(each, rest[1:], number) if own == name else each)
                for own, each in tree.detectors
            )
        )
    return tree._replace(**{head: _put(getattr(tree, head), rest, number)})


def trimmed(config: EngineConfig) -> EngineConfig:
    """The policy without the parts that change neither an order nor a skip."""
    acted_on = incident.causes(config)
    return config._replace(
        clip=None,
        detectors=tuple(
            (name, each) for name, each in config.detectors if int(CAUSES[name]) & acted_on
        ),
        rules=tuple(rule for rule in config.rules if rule.skip or rule.action & incident.ACTS),
    )


def init(config: EngineConfig) -> VariantState:
    """The state before the first step, as NumPy arrays."""
    none = np.zeros((), np.int32)
    return VariantState(
        step=none,
        detectors=tuple(DETECTORS[name].init(each) for name, each in config.detectors),
        rules=tuple(rules.init(rule) for rule in config.rules),
        skips=none.copy(),
        incident=incident.init(),
    )


def step(
    config: EngineConfig, state: VariantState, signals: Signals, resumed: Any, *, xp: Any
) -> tuple[VariantState, VariantDecision]:
    """Judges one step of a config from `trimmed`, in which numbers may be arrays.

    `signals` has a loss or a gradient norm. `resumed` is a bool array: the run continues from a
    checkpoint here, which closes an open incident.
    """
    seen = observe(signals, resumed != resumed, xp=xp)
    detector_states, readings = [], {}
    for (name, thresholds), before in zip(config.detectors, state.detectors, strict=True):
        module = DETECTORS[name]
        if all(getattr(seen, field) is not None for field in module.NEEDS):
            before, readings[name] = module.update(thresholds, before, seen, xp=xp)
        detector_states.append(before)

    never = resumed != resumed
    skip_wanted = softened = recovery = cuts = never
    rule_states = []
    for rule, before in zip(config.rules, state.rules, strict=True):
        hit = _raised(readings, rule.causes, rule.sustained, never)
        quiet = config.incident.quiet_steps
        new_state, firing = rules.update(rule, before, hit, state.step, quiet, xp=xp)
        rule_states.append(new_state._replace(age=before.age))
        if rule.skip:
            skip_wanted = skip_wanted | firing.fired
        if rule.action & Action.SOFT_STEP:
            softened = softened | firing.fired
        if rule.action & Action.ROLLBACK:
            recovery = recovery | firing.fired
        if rule.action & Action.CUT_LR:
            cuts = cuts | firing.fired

    skips, skip, _ = skip_limit.update_soft(
        config.max_skips, state.skips, skip_wanted, softened, seen, xp=xp
    )
    acted_on = incident.causes(config)
    raised = lambda causes: (  # noqa: E731
        _raised(readings, causes, False, never) | _raised(readings, causes, True, never)
    )
    alarm, harmless = raised(acted_on), skip & ~raised(acted_on & ~_NONFINITE)
    before = state.incident
    before = before._replace(
        open=before.open & ~resumed,
        skipped=before.skipped & ~resumed,
        quiet=xp.where(resumed, 0, before.quiet),
    )
    after, wanted = incident.update(
        config.incident, config.rollback, before, state.step, alarm, harmless, recovery, cuts, xp=xp
    )
    first = wanted.recover & ((before.recovered < 0) | (after.number != before.number))
    # Fields that nothing here reads stay unchanged, and cost nothing in a compiled loop.
    after = after._replace(
        number=before.number,
        onset=before.onset,
        last_onset=before.last_onset,
        escalations=before.escalations,
    )
    new = VariantState(state.step + 1, tuple(detector_states), tuple(rule_states), skips, after)
    return new, VariantDecision(wanted.recover, first, skip)


def _raised(readings: Mapping[str, Reading], causes: int, sustained: bool, never: Any) -> Any:
    """Whether one of `causes` is among this step's alarms, or among its sustained causes."""
    raised = never
    for name, reading in readings.items():
        if int(CAUSES[name]) & causes:
            hit = reading.sustained if sustained else reading.alarm
            raised = raised | (hit & ((reading.cause & causes) != 0))
    return raised
