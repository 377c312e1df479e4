"""Reads the metrics file of a Healer line by line: it may have gigabytes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from healcore import regular_file
from healcore.runtime.events.json_lines import MAX_LINE, lines_of
from healcore.runtime.events.models import NONFINITE

CURVES = ("loss", "grad_norm", "threshold", "lr_scale")
_CHUNK = 4096
_MAX_PROBLEMS = 20


class MetricRows(NamedTuple):
    """Rows of a metrics file, in its order."""

    step: np.ndarray  # float64 (n,)
    attempt: np.ndarray  # int64 (n,)
    values: dict[str, np.ndarray]  # by names of CURVES, float32 (n,); NaN where not logged, or NaN
    nonfinite: np.ndarray  # bool (n,): a loss or norm was logged and is not finite
    flags: np.ndarray | None = None  # bool (n, 3): alarm, skipped, clipped; None: not known
    every: np.ndarray | None = None  # int64 (n,): steps per row of thinned metrics; None: 1


class MetricRow(NamedTuple):
    """One line of a metrics file."""

    step: float
    attempt: int
    values: dict[str, float]  # by names of CURVES
    flags: tuple[bool, bool, bool] | None = None
    every: int = 1


class MetricsReader:
    """Reads the rows of some runs. The attributes are filled while `chunks` is consumed.

    `ids` has for each attempt the run's id and its number within that process.
    """

    def __init__(self, path: Path, ids: Sequence[tuple[str, int]]) -> None:
        self.path = path
        self.ids = list(ids)  # also the attempts that only the lines have
        self.problems: list[str] = []  # the first damaged lines, with their numbers
        self.damaged = 0  # damaged lines
        self.others = 0  # lines of other runs
        self.engine: str | None = None  # of the first line; lines of other engines are ignored
        self.left_out: set[str] = set()  # the other engines
        self._numbers = {each: at for at, each in reversed(list(enumerate(self.ids)))}
        self._runs = {run for run, _ in ids}
        self._last: dict[str, float] = {}
        self._ordinal: dict[str, int] = {}

    def chunks(self) -> Iterator[MetricRows]:
        """Reads the file once; an unreadable one raises OSError."""
        rows: list[MetricRow] = []
        with open(self.path, "rb", opener=regular_file.opener) as file:
            for number, line in enumerate(lines_of(file), start=1):
                if not line.strip():
                    continue
                row = self._row(number, line)
                if row is not None:
                    rows.append(row)
                if len(rows) == _CHUNK:
                    yield stack(rows)
                    rows = []
        if rows:
            yield stack(rows)

    def _row(self, number: int, line: bytes) -> MetricRow | None:
        found = parse_metrics(line)
        if isinstance(found, str):
            self.damaged += 1
            if len(self.problems) < _MAX_PROBLEMS:
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
        return MetricRow(step, self._attempt(run, step), curve_values(found), flags, every)

    def _attempt(self, run: str, step: float) -> int:
        ordinal = self._ordinal.get(run, 0)
        if step <= self._last.get(run, -1.0):
            ordinal += 1
        self._ordinal[run], self._last[run] = ordinal, step
        at = self._numbers.setdefault((run, ordinal), len(self.ids))
        if at == len(self.ids):
            self.ids.append((run, ordinal))
        return at


def parse_metrics(line: bytes) -> dict[str, Any] | str:
    """The object in a metrics line, or the reason why there is none."""
    if len(line) > MAX_LINE:
        return f"longer than {MAX_LINE >> 20} MB, which no line of metrics is"
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


def curve_values(line: dict[str, Any]) -> dict[str, float]:
    """The values of the curves in a line, without those that are no numbers."""
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


def stack(rows: Sequence[MetricRow]) -> MetricRows:
    """Makes arrays of rows, all of them with flags or all without."""

    def column(name: str) -> np.ndarray:
        with np.errstate(over="ignore"):  # 1e300 is Inf in float32
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
    flagged = bool(rows) and rows[0].flags is not None
    return MetricRows(
        np.array([row.step for row in rows]),
        np.array([row.attempt for row in rows]),
        values,
        nonfinite,
        np.array([row.flags for row in rows]) if flagged else None,
        np.array([row.every for row in rows]),
    )
