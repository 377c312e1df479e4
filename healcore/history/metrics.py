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
_MAX_DAMAGE = 1000
"""Limit of listed damaged lines."""
_TYPES = {"step": "d", "attempt": "i", "nonfinite": "b", **dict.fromkeys(CURVES, "f")}


class MetricRows(NamedTuple):
    """Rows of a run in file order, as columns."""

    step: np.ndarray  # float64 (n,)
    attempt: np.ndarray  # int32 (n,)
    values: dict[str, np.ndarray]  # name in CURVES -> float32 (n,); NaN where not logged
    nonfinite: np.ndarray  # bool (n,): a logged loss or norm is not finite


class RowCollector:
    """Collects the rows of a run one by one, with 29 bytes per row."""

    def __init__(self) -> None:
        self._columns = {name: array(kind) for name, kind in _TYPES.items()}

    def add(self, attempt: int, line: Mapping[str, Any]) -> None:
        """Adds a metrics line."""
        values = curve_values(line)
        signals = (values.get(name, 0.0) for name in ("loss", "grad_norm"))
        row = {
            **dict.fromkeys(CURVES, math.nan),
            **values,
            "step": float(line["step"]),
            "attempt": attempt,
            "nonfinite": not all(map(math.isfinite, signals)),
        }
        for name, column in self._columns.items():
            column.append(row[name])

    def rows(self) -> MetricRows:
        """Returns the rows as views of the collected data, after which no row can be added."""
        columns = {name: np.frombuffer(data, _TYPES[name]) for name, data in self._columns.items()}
        return MetricRows(
            step=columns["step"],
            attempt=columns["attempt"],
            values={name: columns[name] for name in CURVES},
            nonfinite=columns["nonfinite"].view(bool),
        )


def read_metrics(path: Path, processes: Sequence[str]) -> tuple[MetricRows, list[str]]:
    """Reads the rows of the processes of a run, and lists damaged lines. Raises OSError.

    Of several optimizers, only the first has rows. An attempt begins with a process, or with a
    step that does not increase.
    """
    rows, damage = RowCollector(), list[str]()
    known, engine, last, attempt = set(processes), None, ("", 0), -1
    with open(path, "rb", opener=regular_file.opener) as file:
        for number, text in enumerate(iter_lines(file), start=1):
            if not text.strip():
                continue
            line = parse_metrics(text)
            if isinstance(line, str):
                if len(damage) < _MAX_DAMAGE:
                    damage.append(f"line {number}: {line}")
                continue
            if line["run"] not in known:
                continue
            engine = line.get("engine", "") if engine is None else engine
            if line.get("engine", "") == engine:
                attempt += line["run"] != last[0] or line["step"] <= last[1]
                last = line["run"], line["step"]
                rows.add(attempt, line)
    return rows.rows(), damage


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
    if not isinstance(parsed.get("run"), str):
        return "run is not a string"
    return parsed


def curve_values(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns name -> value of the curves in a metrics line, without values of a wrong type."""
    values = {}
    for name in CURVES:
        value = line.get(name)
        if type(value) in (int, float) or (isinstance(value, str) and value in NONFINITE):
            assert value is not None
            with contextlib.suppress(OverflowError):  # an int of 400 digits
                values[name] = float(value)
    if values.get("threshold") == 0.0:  # 0 means no limit
        del values["threshold"]
    return values
