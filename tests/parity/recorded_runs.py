"""The recorded runs in ../shared/traces."""

import csv
import functools
import json
from pathlib import Path

import numpy as np
import pytest

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
