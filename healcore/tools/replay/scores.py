"""Scores the orders of a policy against labelled events: recall, latency, false alarms.

A policy is scored by the most severe order that its rules can give. An order at row i belongs to an
event if onset - 5 <= i <= end + 40. Orders are ignored in an ambiguous zone (same margins), in the
first 64 rows, and within 40 rows after a non-finite loss. False orders at most 40 rows apart are
one false alarm. Traces of fewer than 200 points are too short for a score.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from healcore import regular_file
from healcore.core.engine import EngineConfig
from healcore.core.errors import HealcoreError
from healcore.core.verdict import Action
from healcore.tools.replay.summary import JudgedRows
from healcore.tools.traces import Rows

EARLY_ROWS, LATE_ROWS, IGNORED_ROWS, MIN_ROWS, IN_TIME_ROWS = 5, 40, 64, 200, 10

ROLLBACKS, STOPS, SKIPS, ALARMS = "rollbacks", "stops", "skips", "alarms"


class LabelError(HealcoreError, ValueError):
    """A file of labels cannot be used. The message has the reason."""


class Zone(NamedTuple):
    """A range of rows, both ends included."""

    onset: int
    end: int

    @property
    def widened(self) -> tuple[int, int]:
        """First row and end of the zone with margins; the end is excluded."""
        return max(0, self.onset - EARLY_ROWS), self.end + LATE_ROWS + 1


class Label(NamedTuple):
    """The labelled events of one trace."""

    file: str
    points: int
    spikes: tuple[Zone, ...]
    ambiguous: tuple[Zone, ...]


class Score(NamedTuple):
    """Counts of orders and events; `plus` adds scores."""

    traces: int = 0
    rows: int = 0
    events: int = 0
    latencies: tuple[int, ...] = ()
    """Rows from the onset to the first order, for each found event."""
    false: int = 0
    """Number of false alarms."""

    @property
    def found(self) -> int:
        """Number of events with an order."""
        return len(self.latencies)

    @property
    def in_time(self) -> int:
        """Number of events with an order within 10 rows of the onset."""
        return sum(latency <= IN_TIME_ROWS for latency in self.latencies)

    @property
    def false_rate(self) -> float:
        """False alarms per 10,000 rows."""
        return 1e4 * self.false / self.rows if self.rows else 0.0

    def plus(self, other: Score) -> Score:
        """Returns the sum of two scores."""
        pairs: Any = zip(self, other, strict=True)
        return Score(*(left + right for left, right in pairs))


class ScoreCollector:
    """Collects the orders of one replay in chunks; `order_kind` is from `severest_order`."""

    def __init__(self, order_kind: str = ROLLBACKS) -> None:
        self._order_kind = order_kind
        self._orders: list[np.ndarray] = []
        self._nonfinite: list[np.ndarray] = []
        self.rows = 0

    def add(self, rows: Rows, judged: JudgedRows) -> None:
        """Adds one chunk."""
        self.rows = int(rows.index[-1]) + 1
        self._orders.append(judged.index[_has_order(judged, self._order_kind)])
        if "loss" in rows.values:
            # A row without a loss has NaN.
            self._nonfinite.append(rows.index[~np.isfinite(rows.values["loss"])])

    def score(self, label: Label) -> Score | None:
        """Returns the score of the finished replay, or None if the trace is too short."""
        if label.points < MIN_ROWS:
            return None
        empty = np.zeros(0, np.int64)
        orders = np.concatenate((empty, *self._orders))
        nonfinite = np.concatenate((empty, *self._nonfinite))
        ((delays,), (false,)) = compare_orders(orders, np.zeros_like(orders), 1, nonfinite, label)
        latencies = tuple(delays[delays >= 0].tolist())
        return Score(1, self.rows, len(label.spikes), latencies, int(false))


def compare_orders(
    orders: np.ndarray, variant: np.ndarray, variants: int, nonfinite: np.ndarray, label: Label
) -> tuple[np.ndarray, np.ndarray]:
    """Compares the orders of several variants of a policy with the events of one trace.

    Args:
        orders: row numbers, int (n,), increasing within a variant.
        variant: the variant of each order, int (n,), increasing.
        variants: number of variants.
        nonfinite: rows without a finite loss, int (m,), increasing.
        label: the events.

    Returns:
        Rows from onset to the first order, int32 (variants, events), or -1 without an order; and
        the number of false alarms, int (variants,).
    """
    delays = np.full((variants, len(label.spikes)), -1, np.int32)
    for event, spike in enumerate(label.spikes):
        start, stop = spike.widened
        in_event = (start <= orders) & (orders < stop)
        found, first = np.unique(variant[in_event], return_index=True)
        delays[found, event] = np.maximum(orders[in_event][first] - spike.onset, 0)
    false = _is_false(orders, nonfinite, label)
    variant, rows = variant[false], orders[false]
    separate = np.ones(len(rows), bool)
    separate[1:] = (np.diff(variant) != 0) | (np.diff(rows) > LATE_ROWS)
    return delays, np.bincount(variant[separate], minlength=variants)


def _is_false(rows: np.ndarray, nonfinite: np.ndarray, label: Label) -> np.ndarray:
    """Whether an order at each row (n,) is false, bool (n,)."""
    allowed = rows < IGNORED_ROWS
    for start, stop in (zone.widened for zone in (*label.ambiguous, *label.spikes)):
        allowed |= (start <= rows) & (rows < stop)
    last = np.searchsorted(nonfinite, rows, side="right") - 1  # last non-finite loss up to the row
    allowed[last >= 0] |= (rows[last >= 0] - nonfinite[last[last >= 0]]) <= LATE_ROWS
    return ~allowed


def severest_order(config: EngineConfig) -> str:
    """Returns the most severe order in the policy's rules: rollbacks, stops, skips or alarms."""
    for order_kind, action in ((ROLLBACKS, Action.ROLLBACK), (STOPS, Action.STOP)):
        if any(rule.action & int(action) for rule in config.rules):
            return order_kind
    return SKIPS if any(rule.skip for rule in config.rules) else ALARMS


def _has_order(judged: JudgedRows, order_kind: str) -> np.ndarray:
    """Whether each row has an order of this kind, bool (n,)."""
    if order_kind == SKIPS:
        return judged.record.skip
    if order_kind == ALARMS:
        return judged.record.cause != 0
    return judged.action & int(Action.ROLLBACK if order_kind == ROLLBACKS else Action.STOP) != 0


class Labels:
    """Labels by trace."""

    def __init__(self, labels: Sequence[Label]) -> None:
        self._by_name: dict[str, list[Label]] = {}
        for label in labels:
            self._by_name.setdefault(PurePath(label.file).name, []).append(label)

    def of(self, trace: str) -> Label | None:
        """Returns the label whose file is the end of the trace's path, or None."""
        parts = Path(trace).absolute().parts  # the user may have passed a relative path
        for label in self._by_name.get(parts[-1], ()):
            wanted = PurePath(label.file).parts
            if parts[-len(wanted) :] == wanted:
                return label
        return None


def read_labels(path: Path) -> Labels:
    """Reads a JSON list of `{"file", "points", "spikes", "ambiguous"}`, or raises LabelError."""
    try:
        return Labels([_label(data) for data in json.loads(regular_file.read(path))])
    except OSError as error:
        raise LabelError(f"{path} cannot be read: {error.strerror or error}") from error
    except (
        ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError
    ) as error:  # fmt: skip
        raise LabelError(
            f'{path} is not a list of labels like [{{"file": "run.csv", "points": 1000, "spikes": '
            f'[{{"onset": 400, "end": 430}}], "ambiguous": []}}]: {type(error).__name__} {error}'
        ) from error


def _label(data: Any) -> Label:
    def zones(name: str) -> tuple[Zone, ...]:
        return tuple(Zone(_row(zone["onset"]), _row(zone["end"])) for zone in data.get(name, ()))

    return Label(str(data["file"]), _row(data["points"]), zones("spikes"), zones("ambiguous"))


def _row(number: Any) -> int:
    return int(np.int32(int(number)))  # raises OverflowError for a larger number
