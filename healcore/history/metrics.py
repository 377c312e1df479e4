"""Reads the metrics file of a Healer line by line into columns."""

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
from healcore.events.json_lines import MAX_LINE, lines_of
from healcore.events.models import NONFINITE

CURVES = ("loss", "grad_norm", "threshold", "lr_scale")
_FLAGS = ("alarm", "skip", "clip")
_MAX_PROBLEMS = 20
_TYPES = {"step": "d", "attempt": "i", "every": "I", **dict.fromkeys(CURVES, "f")}
_TYPES |= dict.fromkeys(("nonfinite", *_FLAGS), "b")


class MetricRows(NamedTuple):
    """Rows of a run in recorded order, as columns."""

    step: np.ndarray  # float64 (n,)
    attempt: np.ndarray  # int32 (n,)
    values: dict[str, np.ndarray]  # name in CURVES -> float32 (n,); NaN where not logged
    nonfinite: np.ndarray  # bool (n,): a loss or norm was logged and is not finite
    every: np.ndarray  # uint32 (n,): steps per row; more than 1 in thinned metrics
    flags: tuple[np.ndarray, np.ndarray, np.ndarray] | None
    """Bool (n,) each: alarm, skipped, clipped. None if the log does not have them."""


class RowCollector:
    """Collects the rows of a run one by one, in 36 bytes each."""

    def __init__(self) -> None:
        self._columns = {name: array(kind) for name, kind in _TYPES.items()}

    def add(self, attempt: int, line: Mapping[str, Any]) -> None:
        """Adds a line of the metrics, or the readings of an alarm under the same names."""
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
        """The rows so far; no further row can be added."""
        found = {name: np.frombuffer(each, _TYPES[name]) for name, each in self._columns.items()}
        bits = {name: found[name].view(bool) for name in ("nonfinite", *_FLAGS)}
        return MetricRows(
            step=found["step"],
            attempt=found["attempt"],
            values={name: found[name] for name in CURVES},
            nonfinite=bits["nonfinite"],
            flags=(bits["alarm"], bits["skip"], bits["clip"]),
            every=found["every"],
        )


class MetricsReader:
    """Reads the rows of some runs; `read` fills the attributes.

    `ids` has the run id of each attempt, and the number of the attempt within that process.
    """

    def __init__(self, path: Path, ids: Sequence[tuple[str, int]]) -> None:
        self.path = path
        self.ids = list(ids)  # including attempts that have no event
        self.problems: list[str] = []  # the first damaged lines, with their numbers
        self.damaged = 0  # damaged lines
        self.others = 0  # lines of other runs
        self.engine: str | None = None  # engine of the first line
        self.ignored_engines: set[str] = set()  # other engines, whose lines are ignored
        self._numbers = {each: at for at, each in reversed(list(enumerate(self.ids)))}
        self._newest = {run: (-1.0, 0) for run, _ in ids}  # step, and number of the attempt

    def read(self) -> MetricRows:
        """Reads the file; an unreadable one raises OSError."""
        found = RowCollector()
        with open(self.path, "rb", opener=regular_file.opener) as file:
            for number, line in enumerate(lines_of(file), start=1):
                if line.strip():
                    self._add(found, number, line)
        return found.rows()

    def _add(self, found: RowCollector, number: int, text: bytes) -> None:
        line = parse_metrics(text)
        if isinstance(line, str):
            self.damaged += 1
            if len(self.problems) < _MAX_PROBLEMS:
                self.problems.append(f"line {number}: {line}")
            return
        run, engine = line.get("run"), line.get("engine", "")
        if not isinstance(run, str) or run not in self._newest:
            self.others += 1
            return
        if self.engine is None:
            self.engine = engine
        if engine != self.engine:
            self.ignored_engines.add(str(engine))
            return
        last, ordinal = self._newest[run]
        ordinal += line["step"] <= last
        self._newest[run] = line["step"], ordinal
        at = self._numbers.setdefault((run, ordinal), len(self.ids))
        if at == len(self.ids):
            self.ids.append((run, ordinal))
        found.add(at, line)


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


def curve_values(line: Mapping[str, Any]) -> dict[str, float]:
    """The values of the curves in a line that are numbers."""
    found = {}
    for name in CURVES:
        value = line.get(name)
        if type(value) in (int, float) or value in NONFINITE:
            assert value is not None
            with contextlib.suppress(OverflowError):  # a whole number of 400 digits
                found[name] = float(value)
    if found.get("threshold") == 0.0:  # no limit in force
        del found["threshold"]
    return found
