"""Compares orders with labelled events: recall, latency, false alarms.

A policy is scored by the most severe order that its rules can give. An order at row i belongs to an
event if onset - 5 <= i <= end + 40. Orders in an ambiguous zone (same margins), in the first 64
rows, or within 40 rows after a loss that is not finite are ignored. False orders up to 40 rows
apart are one false alarm. Traces of fewer than 200 points are too short to be scored.
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

EARLY, LATE, START, FEWEST, IN_TIME = 5, 40, 64, 200, 10

ROLLBACKS, STOPS, SKIPS, ALARMS = "rollbacks", "stops", "skips", "alarms"


class LabelError(HealcoreError, ValueError):
    """A file of labels that cannot be used; the message has the reason."""


class Zone(NamedTuple):
    """Rows, both ends included."""

    onset: int
    end: int

    @property
    def widened(self) -> tuple[int, int]:
        """First and last row with the margins; the last one is excluded."""
        return max(0, self.onset - EARLY), self.end + LATE + 1


class Label(NamedTuple):
    """The labels of one trace."""

    file: str
    points: int
    spikes: tuple[Zone, ...]
    ambiguous: tuple[Zone, ...]


class Score(NamedTuple):
    """Orders compared with the events; scores can be summed with `plus`."""

    traces: int = 0
    rows: int = 0
    events: int = 0
    latencies: tuple[int, ...] = ()
    """Rows from the onset to the first order, for each event that was found."""
    false: int = 0

    @property
    def found(self) -> int:
        """Events with an order."""
        return len(self.latencies)

    @property
    def in_time(self) -> int:
        """Events with an order within 10 rows of the onset."""
        return sum(latency <= IN_TIME for latency in self.latencies)

    @property
    def false_rate(self) -> float:
        """False alarms per 10,000 rows."""
        return 1e4 * self.false / self.rows if self.rows else 0.0

    def plus(self, other: Score) -> Score:
        """The sum of both."""
        pairs: Any = zip(self, other, strict=True)
        return Score(*(mine + theirs for mine, theirs in pairs))


class ScoreCollector:
    """Collects the orders of one replay, chunk by chunk; `answer` is from `answer_of`."""

    def __init__(self, answer: str = ROLLBACKS) -> None:
        self._answer = answer
        self._orders: list[np.ndarray] = []
        self._bad: list[np.ndarray] = []
        self.rows = 0

    def add(self, rows: Rows, judged: JudgedRows) -> None:
        """Adds one chunk."""
        self.rows = int(rows.index[-1]) + 1
        self._orders.append(judged.index[_answers(judged, self._answer)])
        if "loss" in rows.values:
            # A row without a loss is a gap in the curve, as a NaN is.
            self._bad.append(rows.index[~np.isfinite(rows.values["loss"])])

    def score(self, label: Label) -> Score | None:
        """The score after the whole replay; None if the trace is too short."""
        if label.points < FEWEST:
            return None
        none = np.zeros(0, np.int64)
        orders = np.concatenate((none, *self._orders))
        bad = np.concatenate((none, *self._bad))
        ((delays,), (false,)) = compare(orders, np.zeros_like(orders), 1, bad, label)
        latencies = tuple(delays[delays >= 0].tolist())
        return Score(1, self.rows, len(label.spikes), latencies, int(false))


def compare(
    orders: np.ndarray, variant: np.ndarray, variants: int, bad: np.ndarray, label: Label
) -> tuple[np.ndarray, np.ndarray]:
    """Compares the orders of several variants of a policy with the events of one trace.

    Args:
        orders: row numbers, int (n,), increasing within a variant.
        variant: the variant of each order, int (n,), increasing.
        variants: number of variants.
        bad: rows without a finite loss, int (m,), increasing.
        label: the events.

    Returns:
        Rows from onset to the first order, int32 (variants, events), -1 without an order; and
        the number of false alarms, int (variants,).
    """
    delays = np.full((variants, len(label.spikes)), -1, np.int32)
    for event, spike in enumerate(label.spikes):
        start, stop = spike.widened
        here = (start <= orders) & (orders < stop)
        who, first = np.unique(variant[here], return_index=True)
        delays[who, event] = np.maximum(orders[here][first] - spike.onset, 0)
    wrong = ~_neutral(orders, bad, label)
    who, where = variant[wrong], orders[wrong]
    apart = np.ones(len(who), bool)
    apart[1:] = (np.diff(who) != 0) | (np.diff(where) > LATE)
    return delays, np.bincount(who[apart], minlength=variants)


def _neutral(rows: np.ndarray, bad: np.ndarray, label: Label) -> np.ndarray:
    """Flags (n,): an order at this row (n,) is not a false one."""
    found = rows < START
    for start, stop in (each.widened for each in (*label.ambiguous, *label.spikes)):
        found |= (start <= rows) & (rows < stop)
    last = np.searchsorted(bad, rows, side="right") - 1  # the last bad row up to this one
    found[last >= 0] |= (rows[last >= 0] - bad[last[last >= 0]]) <= LATE
    return found


def answer_of(config: EngineConfig) -> str:
    """The most severe that the policy's rules can order: rollbacks, stops, skips, or alarms."""
    for answer, action in ((ROLLBACKS, Action.ROLLBACK), (STOPS, Action.STOP)):
        if any(rule.action & int(action) for rule in config.rules):
            return answer
    return SKIPS if any(rule.skip for rule in config.rules) else ALARMS


def _answers(judged: JudgedRows, answer: str) -> np.ndarray:
    """The rows with such an order, bool (n,)."""
    if answer == SKIPS:
        return judged.record.skip
    if answer == ALARMS:
        return judged.record.cause != 0
    return judged.action & int(Action.ROLLBACK if answer == ROLLBACKS else Action.STOP) != 0


class Labels:
    """A file of labels."""

    def __init__(self, labels: Sequence[Label]) -> None:
        self._by_name: dict[str, list[Label]] = {}
        for label in labels:
            self._by_name.setdefault(PurePath(label.file).name, []).append(label)

    def of(self, trace: str) -> Label | None:
        """The label whose file is the end of the trace's path."""
        parts = Path(trace).absolute().parts  # the user may have named a part of the path only
        for label in self._by_name.get(parts[-1], ()):
            wanted = PurePath(label.file).parts
            if parts[-len(wanted) :] == wanted:
                return label
        return None


def read_labels(path: Path) -> Labels:
    """Reads a JSON list of `{"file", "points", "spikes", "ambiguous"}`, or raises LabelError."""
    try:
        return Labels([_label(each) for each in json.loads(regular_file.read(path))])
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
        return tuple(Zone(int(each["onset"]), int(each["end"])) for each in data.get(name, ()))

    return Label(str(data["file"]), int(data["points"]), zones("spikes"), zones("ambiguous"))
