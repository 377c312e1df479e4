"""Reads a metrics file line by line into curves."""

from __future__ import annotations

import contextlib
import math
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from healcore import regular_file
from healcore.events import json_lines
from healcore.events.models import NONFINITE
from healcore.history.curves import Curves

_CURVES = ("loss", "grad_norm", "threshold", "lr_scale")
_MAX_DAMAGE = 1000
"""Limit of listed damaged lines."""


def read_metrics(path: Path, processes: Sequence[str]) -> tuple[Curves, list[str]]:
    """Reads the rows of the processes of a run, and lists damaged lines. Raises OSError.

    Of several optimizers, only the first has rows. An attempt begins with a process, or with a
    step that does not increase.
    """
    rows, damage = array("d"), list[str]()
    engine, last, attempt = None, ("", 0), -1
    with open(path, "rb", opener=regular_file.opener) as file:
        for number, text in enumerate(json_lines.iter_lines(file), start=1):
            if not text.strip():
                continue
            line = parse_metrics(text)
            if isinstance(line, str):
                if len(damage) < _MAX_DAMAGE:
                    damage.append(f"line {number}: {line}")
                continue
            if line["run"] not in processes:
                continue
            engine = line.get("engine", "") if engine is None else engine
            if line.get("engine", "") == engine:
                attempt += line["run"] != last[0] or line["step"] <= last[1]
                last = line["run"], line["step"]
                rows.extend((line["step"], attempt, *_values(line)))
    step, attempts, nonfinite, *curves = np.frombuffer(rows).reshape(-1, 3 + len(_CURVES)).T
    named = dict(zip(_CURVES, curves, strict=True))
    return Curves(step, attempt=attempts, nonfinite=nonfinite.astype(bool), **named), damage


def parse_metrics(line: bytes) -> dict[str, Any] | str:
    """Returns the object in a metrics line, or the reason why the line is not a metrics line."""
    parsed = json_lines.parse(line)
    if isinstance(parsed, str):
        return parsed
    if parsed.get("kind") != "step":
        return 'not a metrics line, which has "kind": "step"'
    step = parsed.get("step")
    if type(step) is not int or not 0 <= step < 1 << 53:
        return f"step is not a whole number from 0 to 2^53: {step!r:.80}"
    if not isinstance(parsed.get("run"), str):
        return "run is not a string"
    return parsed


def _values(line: Mapping[str, Any]) -> tuple[float, ...]:
    """Whether a logged loss or norm is not finite, then the values of the curves, or NaN."""
    values = {}
    for name in _CURVES:
        value = line.get(name)
        if type(value) in (int, float) or (isinstance(value, str) and value in NONFINITE):
            assert value is not None
            with contextlib.suppress(OverflowError):  # an int of 400 digits
                values[name] = float(value)
    if values.get("threshold") == 0.0:  # 0 means no limit
        del values["threshold"]
    nonfinite = not all(math.isfinite(values.get(name, 0.0)) for name in ("loss", "grad_norm"))
    return nonfinite, *(values.get(name, math.nan) for name in _CURVES)
