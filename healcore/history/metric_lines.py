"""Reading the metrics file of a Healer, line by line: it may have gigabytes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from healcore.runtime.events.models import NONFINITE
from healcore.runtime.events.reading import LONGEST, lines

CURVES = ("loss", "grad_norm", "threshold", "lr_scale")
_ROWS = 4096
_TOLD = 20
"""Damaged lines that are told one by one."""


class Chunk(NamedTuple):
    """Some rows, in the order of the file."""

    step: np.ndarray
    """float64 (n,)."""
    attempt: np.ndarray
    """int64 (n,)."""
    values: dict[str, np.ndarray]
    """By names of CURVES, float32 (n,); NaN where nothing was logged, or where it was NaN."""
    nonfinite: np.ndarray
    """bool (n,): a loss or norm was logged and is not finite."""
    flags: np.ndarray | None = None
    """bool (n, 3): an alarm, skipped, clipped; None: not told."""
    every: np.ndarray | None = None
    """int64 (n,): steps that a row stands for, in metrics that were thinned; None: one each."""


class Row(NamedTuple):
    """One line."""

    step: float
    attempt: int
    values: dict[str, float]
    """By names of CURVES."""
    flags: tuple[bool, bool, bool] | None = None
    every: int = 1


class Lines:
    """The lines of some runs. Filled while `chunks` is consumed.

    Args:
        path: the file.
        ids: of each attempt the run's id and its number within that process.

    Attributes:
        problems: damaged lines, the first ones by number.
        damaged: how many there are.
        others: lines of other runs.
        left_out: engines whose lines are not among the rows: there is one per step.
        ids: attempts, with those added that the lines tell of besides the ones given.
    """

    def __init__(self, path: Path, ids: Sequence[tuple[str, int]]) -> None:
        self.path = path
        self.ids = list(ids)
        self.problems: list[str] = []
        self.damaged = 0
        self.others = 0
        self.engine: str | None = None
        self.left_out: set[str] = set()
        self._places = {each: at for at, each in reversed(list(enumerate(self.ids)))}
        self._runs = {run for run, _ in ids}
        self._last: dict[str, float] = {}
        self._ordinal: dict[str, int] = {}

    def chunks(self) -> Iterator[Chunk]:
        """Reads the file once.

        Raises:
            OSError: it cannot be read.
        """
        rows: list[Row] = []
        with self.path.open("rb") as file:
            for number, line in enumerate(lines(file), start=1):
                if not line.strip():
                    continue
                row = self._row(number, line)
                if row is not None:
                    rows.append(row)
                if len(rows) == _ROWS:
                    yield chunk(rows)
                    rows = []
        if rows:
            yield chunk(rows)

    def _row(self, number: int, line: bytes) -> Row | None:
        found = parse(line)
        if isinstance(found, str):
            self.damaged += 1
            if len(self.problems) < _TOLD:
                self.problems.append(f"line {number}: {found}")
            return None
        run = found.get("run")
        if not isinstance(run, str) or run not in self._runs:
            self.others += 1
            return None
        engine = found.get("engine", "")
        if self.engine is None:
            self.engine = engine
        if engine != self.engine:
            self.left_out.add(str(engine))
            return None
        step = float(found["step"])
        scale = found.get("grad_scale")
        clipped = isinstance(scale, int | float) and scale < 1
        flags = bool(found.get("cause")), found.get("skip") is True, clipped
        every = found.get("every", 1)
        every = every if type(every) is int and 1 <= every < 1 << 32 else 1
        return Row(step, self._attempt(run, step), numbers(found), flags, every)

    def _attempt(self, run: str, step: float) -> int:
        ordinal = self._ordinal.get(run, 0)
        if step <= self._last.get(run, -1.0):
            ordinal += 1
        self._ordinal[run], self._last[run] = ordinal, step
        at = self._places.setdefault((run, ordinal), len(self.ids))
        if at == len(self.ids):
            self.ids.append((run, ordinal))
        return at


def parse(line: bytes) -> dict[str, Any] | str:
    """The object in a metrics line, or in words why there is none."""
    if len(line) > LONGEST:
        return f"longer than {LONGEST >> 20} MB, which no line of metrics is"
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return f"not JSON, {len(line)} bytes"
    if not isinstance(found, dict) or found.get("kind") != "step":
        return 'no metrics: those have "kind": "step"'
    step = found.get("step")
    if type(step) is not int or not 0 <= step < 1 << 53:
        return f"step is not a whole number from 0 to 2^53: {step!r:.80}"
    return found


def numbers(line: dict[str, Any]) -> dict[str, float]:
    """The curves' values in a line; one that is not there, or is no number, is left out."""
    found = {}
    for name in CURVES:
        value = line.get(name)
        if type(value) in (int, float) or value in NONFINITE:
            assert value is not None
            with contextlib.suppress(OverflowError):  # a whole number of 400 digits
                found[name] = float(value)
    if found.get("threshold") == 0.0:  # none in force
        del found["threshold"]
    return found


def chunk(rows: Sequence[Row]) -> Chunk:
    """Rows as a chunk; they all have flags, or none has."""

    def column(name: str) -> np.ndarray:
        with np.errstate(over="ignore"):  # a float64 of 1e300 is Inf in the report
            return np.array([row.values.get(name, np.nan) for row in rows]).astype(np.float32)

    values = {name: column(name) for name in CURVES}
    nonfinite = np.array(
        [
            any(
                name in row.values and not np.isfinite(row.values[name])
                for name in ("loss", "grad_norm")
            )
            for row in rows
        ]
    )
    told = bool(rows) and rows[0].flags is not None
    return Chunk(
        np.array([row.step for row in rows]),
        np.array([row.attempt for row in rows]),
        values,
        nonfinite,
        np.array([row.flags for row in rows]) if told else None,
        np.array([row.every for row in rows]),
    )
