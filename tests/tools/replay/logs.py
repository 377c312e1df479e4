"""Logs of runs, written as files for the replay to read."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from healcore.tools.traces import Trace, open_traces

Column = Sequence[float | str]


def noisy(rows: int, seed: int = 0) -> dict[str, list[float | str]]:
    """A healthy run: a falling loss with noise, and a gradient norm about 0.5."""
    rng = np.random.default_rng(seed)
    loss = 3 + 2 * np.exp(-np.arange(rows) / 300) + 0.02 * rng.standard_normal(rows)
    norm = np.exp(0.1 * rng.standard_normal(rows)) / 2
    return {"loss": [round(x, 5) for x in loss], "grad_norm": [round(x, 5) for x in norm]}


def eventful(rows: int, seed: int = 0) -> dict[str, list[float | str]]:
    """A run with spikes of either kind, NaN, Inf, and rows without a loss, a norm or both."""
    loss, norm = (np.array(column, object) for column in noisy(rows, seed).values())
    for onset in range(120, rows - 40, 300):
        loss[onset : onset + 30] = 6.5 - 0.1 * np.arange(30)
        norm[onset : onset + 30] = 7.25
    norm[60::97] = 4.5
    loss[70::151], norm[70::151] = "nan", "inf"
    norm[250:262] = "nan"
    norm[40::23] = ""
    loss[45::31] = ""
    loss[50::61] = norm[50::61] = ""
    return {"loss": loss.tolist(), "grad_norm": norm.tolist()}


def write(path: Path, columns: Mapping[str, Column], steps: Sequence[float] | None = None) -> Path:
    """A CSV file with these columns and a step column: 0, 1, 2, ... if `steps` is None."""
    steps = range(len(next(iter(columns.values())))) if steps is None else steps
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["step", *columns])
        table.writerows(zip(steps, *columns.values(), strict=True))
    return path


def trace(*paths: Path) -> Trace:
    """The trace in a file; of several files, of the run whose attempts they are."""
    (found,), unreadable = open_traces([str(path) for path in paths], join=len(paths) > 1)
    assert not unreadable, unreadable
    return found


def part(columns: Mapping[str, Column], start: int, stop: int) -> dict[str, Column]:
    return {name: cells[start:stop] for name, cells in columns.items()}
