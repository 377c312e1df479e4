"""The adapter need "sweep_scan": many variants of a policy over recorded series (`healcore sweep`).

An adapter provides a `SweepScan` class, called with the policy's config and the varied places.

A variant is the engine with arrays for some of its numbers, run as a replay runs it
(`healcore.plugins.rows.judge_row`). A recorded curve shows which steps are skipped and where a
rollback is ordered. `variants_of` drops the parts of a policy that change neither; `step` leaves
their state as it is, so that a compiled loop does not compute them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from healcore.core.detectors import CAUSES
from healcore.core.engine import Engine, EngineConfig, EngineState, incident
from healcore.core.signals import Signals
from healcore.plugins.rows import SignalLayout, judge_row

WORD = 32
"""Rows of a group: the orders of a group are the bits of one word."""

Place = tuple[str | int, ...]
"""The path from an `EngineConfig` to a number: names of fields and detectors, indices of rules."""


class PackedRows(NamedTuple):
    """All rows of some series, in groups of `WORD`; rows outside of a group are not judged."""

    signals: np.ndarray
    """float32 (rows, signals of the layout)."""
    kind: np.ndarray
    """int32 (rows,): which of the layout's combinations the row has."""
    resumed: np.ndarray
    """bool (rows,): the first row after the checkpoint that a resumed attempt continues from."""
    own: np.ndarray
    """bool (rows,): counts; false for rows of earlier attempts, which only update the state."""
    start: np.ndarray
    """int32 (groups,): first row of the group."""
    stop: np.ndarray
    """int32 (groups,): row after the group's last; `start` of a group without rows."""
    fresh: np.ndarray
    """bool (groups,): a series begins here, with a new state."""


class PackedSeries(NamedTuple):
    """Series of one layout, packed for one call of a program; each begins a new group."""

    layout: SignalLayout
    rows: PackedRows
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


class VariantDecision(NamedTuple):
    """The decision about one step. Bools."""

    order: Any
    """A rollback is due, whether or not the budget still grants it."""
    first: Any
    """It is the first of its incident. A recorded curve does not heal, so the order repeats every
    `incident.patience` alarms, where a live run has rolled back once."""
    skip: Any


def configure(
    config: EngineConfig, places: tuple[Place, ...], numbers: tuple[Any, ...]
) -> EngineConfig:
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


def variants_of(
    config: EngineConfig, places: tuple[Place, ...], numbers: tuple[Any, ...]
) -> Engine:
    """The engine of the variants, without the parts that change neither an order nor a skip."""
    config = configure(config, places, numbers)
    acted_on = incident.causes(config)
    return Engine(
        config._replace(
            clip=None,
            update_clip=None,
            detectors=tuple(
                (name, each) for name, each in config.detectors if int(CAUSES[name]) & acted_on
            ),
            rules=tuple(rule for rule in config.rules if rule.skip or rule.action & incident.ACTS),
        )
    )


def step(
    engine: Engine, state: EngineState, signals: Signals, *, xp: Any
) -> tuple[EngineState, VariantDecision]:
    """Judges one row; `engine` is from `variants_of`."""
    new, (*_, due) = judge_row(engine, state, signals, xp=xp)
    before, after = state.incident, new.incident
    first = due & ((before.recovered < 0) | (after.number != before.number))
    verdict = VariantDecision(due, first, new.last.decision.skip)
    # Everything else decides nothing here; the age of a rule, for one, is for its alerts.
    ages = (old.age for old in state.rules)
    return state._replace(
        step=new.step,
        detectors=new.detectors,
        rules=tuple(rule._replace(age=age) for rule, age in zip(new.rules, ages, strict=True)),
        skips=new.skips,
        incident=before._replace(
            open=after.open,
            skipped=after.skipped,
            quiet=after.quiet,
            recovered=after.recovered,
            cut=after.cut,
        ),
    ), verdict
