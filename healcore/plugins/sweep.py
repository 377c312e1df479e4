"""The capability "sweep_scan": many variants of a policy over recorded series (`healcore sweep`).

It is a `SweepScan` class, which is called with the policy's config and the varied places.

A variant is an engine in which some numbers are arrays. It runs as in a replay
(`healcore.plugins.rows.judge_row`). The result is the skipped steps and the rollback orders.
`variants_of` drops the parts of a policy that affect neither. `step` keeps the state of unused
parts, so that a compiled loop does not compute it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from healcore.core.detectors import CAUSES
from healcore.core.engine import Engine, EngineConfig, EngineState, incident
from healcore.core.signals import Signals
from healcore.plugins.rows import SignalLayout, judge_row

WORD = 32
"""Rows per group: the orders of a group are the bits of one word."""

Place = tuple[str | int, ...]
"""Path from an `EngineConfig` to a number: fields, names of detectors, indices of rules."""


class PackedRows(NamedTuple):
    """Rows of several series in groups of at most `WORD`; rows outside of groups are padding."""

    signals: np.ndarray
    """float32 (rows, signals of the layout)."""
    kind: np.ndarray
    """int32 (rows,): index in the layout's combinations."""
    resumed: np.ndarray
    """bool (rows,): first row after the checkpoint from which an attempt resumes."""
    own: np.ndarray
    """bool (rows,): counts; rows of earlier attempts only update the state."""
    start: np.ndarray
    """int32 (groups,): first row of the group."""
    stop: np.ndarray
    """int32 (groups,): end of the group, exclusive; equals `start` for an empty group."""
    fresh: np.ndarray
    """bool (groups,): the group begins a series, with a new state."""


class PackedSeries(NamedTuple):
    """Series of one layout, packed for one call of a program; each begins a new group."""

    layout: SignalLayout
    rows: PackedRows
    indices: tuple[int, ...]
    """Index of each series among all series of the sweep."""
    first_groups: tuple[int, ...]
    """First group of each series."""


class SweepScan(Protocol):
    """Runs the variants of one policy on one backend. Thread-safe."""

    def run(
        self, numbers: tuple[np.ndarray, ...], packed: PackedSeries
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Runs the variants over each series.

        Args:
            numbers: an array (variants,) per varied place.
            packed: the series.

        Returns:
            uint32 (groups, variants): bit `j` is the order at the group's row `j`. Two int32 arrays
            (groups, variants): skips, and first orders of incidents, in rows with `own`.
        """
        ...


class VariantDecision(NamedTuple):
    """The decision about one step, in bools."""

    order: Any
    """A rollback is due, even if the budget is exhausted."""
    first: Any
    """The order is the first of its incident. A recorded curve does not heal, so the order repeats
    every `incident.patience` alarms, where a live run would have rolled back once."""
    skip: Any


def configure(
    config: EngineConfig, places: tuple[Place, ...], numbers: tuple[Any, ...]
) -> EngineConfig:
    """Returns the config with Python numbers or arrays at `places`."""
    for place, number in zip(places, numbers, strict=True):
        config = _put(config, place, number)
    return config


def _put(tree: Any, place: Place, number: Any) -> Any:
    if not place:
        return number
    head, rest = place[0], place[1:]
    if isinstance(head, int):
        return tuple(_put(part, rest, number) if i == head else part for i, part in enumerate(tree))
    if head == "detectors":
        name = rest[0]
        return tree._replace(
            detectors=tuple(
                (other, _put(table, rest[1:], number) if other == name else table)
                for other, table in tree.detectors
            )
        )
    return tree._replace(**{head: _put(getattr(tree, head), rest, number)})


def variants_of(
    config: EngineConfig, places: tuple[Place, ...], numbers: tuple[Any, ...]
) -> Engine:
    """The engine of the variants, without parts that affect neither orders nor skips."""
    config = configure(config, places, numbers)
    acted_on = incident.causes(config)
    return Engine(
        config._replace(
            clip=None,
            detectors=tuple(
                (name, table) for name, table in config.detectors if int(CAUSES[name]) & acted_on
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
    # The rest affects neither orders nor skips; the age of a rule, for example, delays alerts.
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
