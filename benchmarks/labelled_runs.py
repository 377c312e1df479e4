"""Recorded runs with labelled loss spikes, and the score of a rule's alarms on them.

A folder with `labels.json`: a list of {"file", "spikes": [{"onset", "end"}], "ambiguous": [the
same], ...} with rows counted from 0, next to CSV files with `loss` and perhaps `grad_norm`. How
alarms count is written down with the labels (README.md there): `_Around` below holds the margins.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np


class _Around:
    """Rows around a label within which an alarm belongs to it."""

    before = 5  # a label's onset is a matter of taste
    after = 40  # the aftermath; also after a non-finite value
    start = 64  # nothing is counted so early
    apart = 40  # false alarms closer than this are one incident
    shortest = 200  # runs with fewer rows are not scored


class Span(NamedTuple):
    """Rows onset..end, both included."""

    onset: int
    end: int


class Run(NamedTuple):
    """One recorded run."""

    file: str
    family: str
    loss: np.ndarray
    """float32 (rows,), as recorded."""
    norm: np.ndarray | None
    """float32 (rows,): gradient norms, or None."""
    events: tuple[Span, ...]
    ambiguous: tuple[Span, ...]


def family(file: str) -> str:
    """The kind of run, by the folder and, in MLPerf, by the model."""
    first, second = file.split("/")[:2]
    if first.startswith("mlperf"):
        return "llama_8b" if second.startswith("llama31_8b") else "mlperf_other"
    return f"algoperf/{second}" if first == "algoperf" else first


def load(folder: Path) -> list[Run]:
    """All runs of a folder.

    Args:
        folder: holds `labels.json`.

    Raises:
        FileNotFoundError: it does not.
    """
    runs = []
    for label in json.loads((folder / "labels.json").read_text()):
        with (folder / label["file"]).open(newline="") as lines:
            rows = list(csv.DictReader(lines))
        spans = [
            tuple(Span(each["onset"], each["end"]) for each in label[kind])
            for kind in ("spikes", "ambiguous")
        ]
        loss, name = _column(rows, "loss"), label["file"]
        if loss is None:
            raise ValueError(f"{name}: a labelled run needs a loss in every row, and has none")
        runs.append(Run(name, family(name), loss, _column(rows, "grad_norm"), *spans))
    return runs


def _column(rows: list[dict[str, str]], name: str) -> np.ndarray | None:
    """A signal, or None where it was never logged: an empty cell is no NaN."""
    cells = [row.get(name) or "" for row in rows]
    if not any(cells):
        return None
    return np.array([float(cell) for cell in cells], np.float32)


@dataclass
class Score:
    """Counts of one rule on one family of runs."""

    files: int = 0
    rows: int = 0
    events: int = 0
    found: int = 0
    within_10: int = 0
    latencies: list[int] = field(default_factory=list)
    false: int = 0
    """Incidents that belong to no label."""
    false_files: int = 0
    nonfinite_files: int = 0
    nonfinite_latencies: list[int] = field(default_factory=list)
    """Rows from the first NaN or Inf of a file to the first alarm at or after it."""

    @property
    def median_latency(self) -> float | None:
        """Rows from an event's onset to the first alarm in it; None when none was found."""
        return statistics.median(self.latencies) if self.latencies else None

    @property
    def false_per_10k(self) -> float:
        """False incidents per 10,000 rows."""
        return 1e4 * self.false / self.rows if self.rows else 0.0


def score(runs: Iterable[Run], alarms: Mapping[str, np.ndarray]) -> dict[str, Score]:
    """Scores by family; a run whose file is not in `alarms` is left out.

    Args:
        runs: labelled runs.
        alarms: bool (rows,) by file.
    """
    scores: dict[str, Score] = {}
    for run in runs:
        if run.file not in alarms:
            continue
        at = np.flatnonzero(alarms[run.file])
        total = scores.setdefault(run.family, Score())
        wrong = np.flatnonzero(~np.isfinite(run.loss))
        if len(wrong):
            total.nonfinite_files += 1
            later = at[at >= wrong[0]]
            total.nonfinite_latencies += [int(later[0] - wrong[0])] if len(later) else []
        if len(run.loss) >= _Around.shortest:
            _add(total, run, at, wrong)
    return scores


def _add(total: Score, run: Run, at: np.ndarray, wrong: np.ndarray) -> None:
    total.files += 1
    total.rows += len(run.loss)
    total.events += len(run.events)
    excused = at < _Around.start
    for row in wrong:
        excused |= (at >= row) & (at <= row + _Around.after)
    for span in (*run.events, *run.ambiguous):
        excused |= _belongs(at, span)
    for event in run.events:
        own = at[_belongs(at, event)]
        if len(own):
            latency = max(0, int(own[0]) - event.onset)
            total.found += 1
            total.within_10 += latency <= 10
            total.latencies.append(latency)
    false = at[~excused]
    incidents = int((np.diff(false) > _Around.apart).sum()) + bool(len(false))
    total.false += incidents
    total.false_files += bool(incidents)


def _belongs(at: np.ndarray, span: Span) -> np.ndarray:
    return (at >= span.onset - _Around.before) & (at <= span.end + _Around.after)
