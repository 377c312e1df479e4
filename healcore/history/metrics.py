"""Reads a metrics file line by line into columns."""

from __future__ import annotations

import contextlib
import json
import math
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from healcore import regular_file
from healcore.events.json_lines import MAX_LINE_BYTES, iter_lines
from healcore.events.models import NONFINITE

CURVES = ("loss", "grad_norm", "threshold", "lr_scale")
_FLAGS = ("alarm", "skip", "clip")
_MAX_PROBLEMS = 20
_TYPES = {"step": "d", "attempt": "i", "every": "I", **dict.fromkeys(CURVES, "f")}
_TYPES |= dict.fromkeys(("nonfinite", *_FLAGS), "b")


class MetricRows(NamedTuple):
    """Rows of a run in file order, as columns."""

    step: np.ndarray  # float64 (n,)
    attempt: np.ndarray  # int32 (n,)
    values: dict[str, np.ndarray]  # name in CURVES -> float32 (n,); NaN where not logged
    nonfinite: np.ndarray  # bool (n,): a logged loss or norm is not finite
    every: np.ndarray  # uint32 (n,): steps per row, more than 1 in thinned metrics
    flags: tuple[np.ndarray, np.ndarray, np.ndarray] | None
    """Bool (n,) each: alarm, skipped, clipped. None if the log does not record these flags."""


class RowCollector:
    """Collects the rows of a run one by one, with 36 bytes per row."""

    def __init__(self) -> None:
        self._columns = {name: array(kind) for name, kind in _TYPES.items()}

    def add(self, attempt: int, line: Mapping[str, Any]) -> None:
        """Adds a metrics line, or the readings of an alarm as a metrics line."""
        values = curve_values(line)
        scale, every = line.get("grad_scale"), line.get("every", 1)
        row = {
            **dict.fromkeys(CURVES, math.nan),
            **values,
            "step": float(line["step"]),
            "attempt": attempt,
            "every": every if type(every) is int and 1 <= every < 1 << 32 else 1,
            "nonfinite": not all(
                math.isfinite(values.get(name, 0.0)) for name in ("loss", "grad_norm")
            ),
            "alarm": bool(line.get("cause")),
            "skip": line.get("skip") is True,
            "clip": isinstance(scale, int | float) and scale < 1,
        }
        for name, column in self._columns.items():
            column.append(row[name])

    def rows(self) -> MetricRows:
        """Returns the rows as views of the collected data, after which no row can be added."""
        columns = {name: np.frombuffer(data, _TYPES[name]) for name, data in self._columns.items()}
        bits = {name: columns[name].view(bool) for name in ("nonfinite", *_FLAGS)}
        return MetricRows(
            step=columns["step"],
            attempt=columns["attempt"],
            values={name: columns[name] for name in CURVES},
            nonfinite=bits["nonfinite"],
            flags=(bits["alarm"], bits["skip"], bits["clip"]),
            every=columns["every"],
        )


class MetricsReader:
    """Reads the rows of a run from its metrics file. `read` fills the attributes.

    `ids` has the process id of each attempt, and the number of the attempt within the process.
    """

    def __init__(self, path: Path, ids: Sequence[tuple[str, int]]) -> None:
        self.path = path
        self.ids = list(ids)  # including attempts without an event
        self.problems: list[str] = []  # the first few damaged lines
        self.damaged_lines = 0
        self.foreign_lines = 0  # lines of other runs
        self.engine: str | None = None  # engine of the first line
        self.ignored_engines: set[str] = set()  # other engines, whose lines are ignored
        self._attempts = {key: number for number, key in reversed(list(enumerate(self.ids)))}
        self._newest = {run: (-1.0, 0) for run, _ in ids}  # step, and number within the process

    def read(self) -> MetricRows:
        """Reads the file. Raises OSError."""
        rows = RowCollector()
        with open(self.path, "rb", opener=regular_file.opener) as file:
            for number, line in enumerate(iter_lines(file), start=1):
                if line.strip():
                    self._add(rows, number, line)
        return rows.rows()

    def _add(self, rows: RowCollector, number: int, text: bytes) -> None:
        line = parse_metrics(text)
        if isinstance(line, str):
            self.damaged_lines += 1
            if len(self.problems) < _MAX_PROBLEMS:
                self.problems.append(f"line {number}: {line}")
            return
        run, engine = line.get("run"), line.get("engine", "")
        if not isinstance(run, str) or run not in self._newest:
            self.foreign_lines += 1
            return
        if self.engine is None:
            self.engine = engine
        if engine != self.engine:
            self.ignored_engines.add(str(engine))
            return
        last, ordinal = self._newest[run]
        ordinal += line["step"] <= last
        self._newest[run] = line["step"], ordinal
        attempt = self._attempts.setdefault((run, ordinal), len(self.ids))
        if attempt == len(self.ids):
            self.ids.append((run, ordinal))
        rows.add(attempt, line)


def parse_metrics(line: bytes) -> dict[str, Any] | str:
    """Returns the object in a metrics line, or the reason why the line is not a metrics line."""
    if len(line) > MAX_LINE_BYTES:
        return f"longer than {MAX_LINE_BYTES >> 20} MB, the limit of a line"
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        return f"not JSON, {len(line)} bytes"
    if not isinstance(parsed, dict) or parsed.get("kind") != "step":
        return 'not a metrics line, which has "kind": "step"'
    step = parsed.get("step")
    if type(step) is not int or not 0 <= step < 1 << 53:
        return f"step is not a whole number from 0 to 2^53: {step!r:.80}"
    return parsed


def curve_values(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns name -> value of the curves in a metrics line, without values of a wrong type."""
    values = {}
    for name in CURVES:
        value = line.get(name)
        if type(value) in (int, float) or value in NONFINITE:
            assert value is not None
            with contextlib.suppress(OverflowError):  # an int of 400 digits
                values[name] = float(value)
    if values.get("threshold") == 0.0:  # 0 means no limit
        del values["threshold"]
    return values
