"""Scoring of alarms, on runs made by hand; and the benchmark as a whole on a folder of two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.labelled_runs import Run, Score, Span, score

ROOT = Path(__file__).resolve().parents[2]


def scored(at: list[int], *, rows: int = 1000, wrong: tuple[int, ...] = ()) -> Score:
    """One run with an event at 300..350 and a doubtful zone at 600..610."""
    loss = np.ones(rows, np.float32)
    loss[list(wrong)] = np.nan
    alarms = np.zeros(rows, bool)
    alarms[at] = True
    run = Run("a/b.csv", "a", loss, None, (Span(300, 350),), (Span(600, 610),))
    return score([run], {"a/b.csv": alarms})["a"]


@pytest.mark.parametrize(
    ("at", "found", "false"),
    [
        *((at, 1, 0) for at in (295, 300, 307, 390)),  # around the event
        *((at, 0, 1) for at in (294, 391, 594, 651, 900)),  # elsewhere
        *((at, 0, 0) for at in (0, 63, 595, 650)),  # may be right
    ],
)
def test_an_alarm_at_a_row(at, found, false):
    got = scored([at])
    assert (got.found, got.false, got.false_files) == (found, false, false)
    assert got.latencies == [max(0, at - 300)] * found
    assert got.within_10 == (found and at <= 310)
    assert got.false_per_10k == 10.0 * false


def test_false_alarms_within_forty_rows_are_one_incident():
    assert [scored(at).false for at in ([700, 740, 780], [700, 741])] == [1, 2]


def test_the_rows_after_a_nan_are_excused_and_timed():
    got = scored([803, 841], wrong=(800, 801))
    assert (got.false, got.nonfinite_files, got.nonfinite_latencies) == (0, 1, [3])
    assert scored([841], wrong=(800,)).false == 1
    assert scored([10], wrong=(800,)).nonfinite_latencies == []


def folder(path: Path) -> Path:
    """A healthy run, and one with norms, a spike of 40 rows at 400, and a NaN at 600."""
    rng = np.random.default_rng(0)
    labels = []
    for name in ("healthy", "spiky"):
        loss = 2 + 0.05 * rng.normal(size=700)
        lines = ["step,loss,grad_norm"]
        spikes = []
        if name == "spiky":
            loss[400:440] += 1.0
            loss[600] = np.nan
            spikes = [{"onset": 400, "end": 440}]
        for step, value in enumerate(loss):
            norm = f"{1 + 0.1 * rng.random():.4f}" if name == "spiky" else ""
            lines.append(f"{step},{value:.5f},{norm}")
        (path / name).mkdir()
        (path / name / "run.csv").write_text("\n".join(lines) + "\n")
        labels.append({"file": f"{name}/run.csv", "spikes": spikes, "ambiguous": []})
    (path / "labels.json").write_text(json.dumps(labels))
    return path


def test_the_benchmark_on_a_folder(tmp_path):
    script = ROOT / "benchmarks" / "detectors.py"
    results = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, script, folder(tmp_path), "--policy", "pretraining", "--json", results],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "healcore pretraining: rollbacks" in done.stdout

    def no_constant(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    scores = json.loads(results.read_text(), parse_constant=no_constant)["scores"]
    healed = scores["healcore pretraining: rollbacks"]
    assert healed["spiky"]["within_10"] == 1
    assert healed["spiky"]["false"] == healed["healthy"]["false"] == 0
    assert scores["healcore pretraining: skips"]["spiky"]["nonfinite_latencies"] == [0]
