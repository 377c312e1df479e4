"""The recorded runs in ../shared/traces, as lanes of one length."""

import csv
import functools
import json
from pathlib import Path

import numpy as np
import pytest

from healcore.core.signals import Signals

FOLDER = Path(__file__).parents[3] / "shared" / "traces"

needed = pytest.mark.skipif(
    not (FOLDER / "labels.json").is_file(), reason=f"no recorded runs: {FOLDER} is not there"
)


@functools.cache
def all_runs() -> list[tuple[str, np.ndarray, np.ndarray | None, int]]:
    """(name, losses, norms or None, row of the first labelled spike or 0) of each file."""
    runs = []
    for label in json.loads((FOLDER / "labels.json").read_text()):
        with (FOLDER / label["file"]).open() as lines:
            rows = list(csv.DictReader(lines))
        loss = np.array([float(row["loss"] or "nan") for row in rows], np.float32)
        norm = None
        if rows and "grad_norm" in rows[0]:
            norm = np.array([float(row["grad_norm"] or "nan") for row in rows], np.float32)
        onset = label["spikes"][0]["onset"] if label["spikes"] else 0
        runs.append((label["file"], loss, norm, onset))
    return runs


def lanes(rows: int, *, norms: bool) -> Signals:
    """All runs with (or without) gradient norms, `rows` of each, side by side.

    A longer run is cut to a window about its first spike; a shorter one ends in skipped steps.
    """
    chosen = [run for run in all_runs() if (run[2] is not None) == norms]
    loss, norm = np.ones((2, rows, len(chosen)), np.float32)
    skipped = np.ones((rows, len(chosen)), bool)
    for lane, (_, losses, its_norms, onset) in enumerate(chosen):
        start = max(0, min(onset - rows // 2, len(losses) - rows))
        part = slice(start, start + rows)
        length = len(losses[part])
        loss[:length, lane] = losses[part]
        skipped[:length, lane] = False
        if its_norms is not None:
            norm[:length, lane] = its_norms[part]
    return Signals(loss=loss, grad_norm=norm if norms else None, externally_skipped=skipped)
