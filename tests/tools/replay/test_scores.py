"""Scores against labels: cases counted by hand, and the official scorer where it is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from healcore.tools.replay.vary import Label, label_of, score

SCORER = Path(__file__).parents[4] / "shared" / "tools" / "score_detectors.py"


def scored(orders, loss, label):
    """The score of a run with orders at these rows."""
    nonfinite = np.flatnonzero(~np.isfinite(loss))
    return score(np.array(orders, np.int64), nonfinite, label)


@pytest.mark.parametrize(
    ("orders", "found", "false"),
    [
        ([], 0, 0),
        ([300], 1, 0),
        ([295], 1, 0),  # five rows before the onset still belong to it
        ([294], 0, 1),
        ([350], 1, 0),  # forty rows after its end too
        ([351], 0, 1),
        ([63], 0, 0),  # among the first 64 rows nothing counts
        ([64], 0, 1),
        ([200, 240, 280], 0, 1),  # forty rows apart: one false alarm
        ([200, 241], 0, 2),
        ([480], 0, 0),  # ambiguous
    ],
)
def test_what_counts(orders, found, false):
    loss = np.ones(600, np.float32)
    score = scored(orders, loss, Label("", 600, [(300, 310)], [(470, 490)]))
    assert score.events == 1
    assert (len(score.latencies), score.false) == (found, false)


def test_latency():
    loss = np.ones(600, np.float32)
    label = Label("", 600, [(100, 110), (200, 210), (300, 310)], [])
    score = scored([98, 203, 311], loss, label)
    assert score.latencies == (0, 3, 11)


def test_a_label_is_found_by_the_end_of_the_path():
    names = ("calm/a.csv", "spiky/a.csv", "b.csv")
    labels = [Label(name, 600, [], []) for name in names]
    for path, file in {
        "/data/spiky/a.csv": "spiky/a.csv",
        "calm/a.csv": "calm/a.csv",
        "./b.csv": "b.csv",
        "x/b.csv": "b.csv",
        "x/a.csv": None,
        "c.csv": None,
    }.items():
        found = label_of(labels, path)
        assert (found and found.file) == file, path


@pytest.mark.skipif(not SCORER.is_file(), reason=f"no official scorer: {SCORER} is not there")
def test_the_official_scorer_agrees(tmp_path):
    """Random orders, losses with NaN, spikes and ambiguous zones; the sums over 40 runs."""
    rng = np.random.default_rng(5)
    mine, labels = [], []
    (tmp_path / "alarms" / "algoperf" / "x").mkdir(parents=True)
    (tmp_path / "algoperf" / "x").mkdir(parents=True)
    for number in range(40):
        rows = int(rng.integers(150, 900))
        loss = rng.random(rows).astype(np.float32)
        loss[rng.random(rows) < 0.002] = np.nan
        orders = np.flatnonzero(rng.random(rows) < 0.02)
        at = np.sort(rng.choice(rows, 8, replace=False))
        zones = [(int(a), int(b)) for a, b in zip(at[::2], at[1::2], strict=True)]
        known = Label(f"algoperf/x/{number}.csv", rows, zones[:3], zones[3:])
        labels.append(
            {
                "file": known.file,
                "points": rows,
                "spikes": [{"onset": onset, "end": end} for onset, end in known.spikes],
                "ambiguous": [{"onset": onset, "end": end} for onset, end in known.ambiguous],
            }
        )
        lines = [f"{step},{value}" for step, value in enumerate(loss)]
        (tmp_path / known.file).write_text("\n".join(["step,loss", *lines]))
        alarms = tmp_path / "alarms" / f"{known.file}.json"
        alarms.write_text(json.dumps({"alarms": orders.tolist()}))
        mine.append(scored(orders, loss, known))
    (tmp_path / "labels.json").write_text(json.dumps(labels))
    command = [sys.executable, str(SCORER), str(tmp_path), "json", str(tmp_path / "alarms")]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    parts = output.split()
    latencies = [latency for each in mine for latency in each.latencies]
    assert int(parts[parts.index("recall") + 1]) == len(latencies) > 20
    assert int(parts[parts.index("steps") + 1].rstrip(")")) == sum(each <= 10 for each in latencies)
    assert float(parts[parts.index("latency") + 1]) == np.median(latencies)
    assert int(parts[parts.index("false") + 1]) == sum(each.false for each in mine) > 20
