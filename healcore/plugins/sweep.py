"""Many variants of a policy over recorded series: what `healcore sweep` asks of an adapter.

The need is "sweep_scan": a `SweepScan` class, called with a config from `trimmed` and the places
that vary.

A recorded curve shows which steps are skipped and where a rollback is ordered. What a policy clips,
how far it cuts the learning rate and what its budget grants change nothing in it. So `step` runs
only the detectors that some rule acts on, those rules and the incident (a cut that is due takes a
rollback along): the same functions of the core in the same order as `healcore.core.engine.judge`.
Each rule reads only the detectors that it listens to: what does not depend on the varied numbers
(the window of the non-finite rule, say) stays one value for all variants.
tests/tools/sweep holds every order and every skip equal to those of the whole engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from healcore.core.detectors import CAUSES, DETECTORS
from healcore.core.engine import EngineConfig, incident, rules, skip_limit
from healcore.core.signals import Signals, observe
from healcore.core.verdict import Action, Cause, Reading
from healcore.plugins.rows import SignalLayout

WORD = 32
"""Rows of a group: one word of bits holds its orders."""

Place = tuple[str | int, ...]
"""The way from an `EngineConfig` to one number: names of fields and detectors, indices of rules."""

_NONFINITE = int(Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD)
_ACTS = int(Action.ROLLBACK | Action.CUT_LR | Action.STOP)


class PackedRows(NamedTuple):
    """All rows of some series; those beyond the last group's are not judged."""

    signals: np.ndarray
    """float32 (rows, signals of the layout)."""
    kind: np.ndarray
    """int32 (rows,): which of the layout's combinations the row has."""
    resumed: np.ndarray
    """bool (rows,): the first row after the checkpoint that a resumed attempt went on from."""
    own: np.ndarray
    """bool (rows,): counts; false for rows of earlier attempts, which only lead to the state."""


class RowGroups(NamedTuple):
    """int32 or bool (groups,) each; a group without rows has `start == stop`."""

    start: np.ndarray
    stop: np.ndarray
    fresh: np.ndarray
    """A series begins here, with a new state."""


class PackedSeries(NamedTuple):
    """Series of one layout, one after another, so that one call of a compiled program runs many.

    Each begins a new group of `WORD` rows.
    """

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
    """The engine's memory, as far as it matters here."""

    step: Any
    """int32: steps judged."""
    detectors: tuple[Any, ...]
    rules: tuple[rules.RuleState, ...]
    skips: Any
    """int32: finite steps skipped in a row."""
    incident: incident.IncidentState


class VariantDecision(NamedTuple):
    """One step. Bools."""

    order: Any
    """A recovery is due, whether or not the budget still grants it."""
    first: Any
    """It is the first of its incident. A recorded curve does not heal: on it the order is repeated
    every `incident.patience` alarms, where a live run has gone back once."""
    skip: Any


def configure(config: EngineConfig, places: tuple[Place, ...], numbers: tuple[Any, ...]) -> Any:
    """The config with its numbers at `places` replaced, by Python numbers or arrays."""
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
    """The policy without what changes neither an order nor a skip."""
    trouble = _trouble(config)
    return config._replace(
        clip=None,
        detectors=tuple(
            (name, each) for name, each in config.detectors if int(CAUSES[name]) & trouble
        ),
        rules=tuple(rule for rule in config.rules if rule.skip or rule.action & _ACTS),
    )


def init(config: EngineConfig) -> VariantState:
    """Before the first step, as NumPy arrays."""
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

    skips, skip = skip_limit.update(config.max_skips, state.skips, wished, seen, xp=xp)
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
    new = VariantState(state.step + 1, tuple(memories), tuple(remembered), skips, after)
    return new, VariantDecision(wanted.recover, first, skip)


def _heard(readings: Mapping[str, Reading], causes: int, sustained: bool, never: Any) -> Any:
    """Whether one of `causes` is among this step's alarms, or among what is sustained."""
    heard = never
    for name, reading in readings.items():
        if int(CAUSES[name]) & causes:
            hit = reading.sustained if sustained else reading.alarm
            heard = heard | (hit & ((reading.cause & causes) != 0))
    return heard


def _trouble(config: EngineConfig) -> int:
    """Causes that open an incident: those that some rule acts on."""
    mask = _NONFINITE
    for rule in config.rules:
        if rule.skip or rule.action & _ACTS:
            mask |= rule.causes
    return mask
