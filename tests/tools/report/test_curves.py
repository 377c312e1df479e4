"""Long runs are thinned: outliers are kept, and memory stays bounded."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from healcore.history import Curves
from healcore.tools.report.picture import draw
from healcore.tools.report.run_report import read_reports
from tests.tools.report.test_page import empty, hostile

ROWS = 40_000
SPIKE, NAN, BACK, TO = 21_234, 27_777, 30_000, 25_000


@pytest.fixture
def long(tmp_path) -> Path:
    """40,000 rows with a spike, a NaN, and a rollback of 5,000 steps."""
    events = [
        {"kind": "start", "step": None, "host": "h", "pid": 1, "environment": {}, "policy": "p"},
        {"kind": "incident", "step": BACK - 1, "incident": 1, "onset": BACK - 1, "cause": []},
        {"kind": "rollback", "step": BACK, "onset": BACK - 1, "checkpoint": TO},
    ]
    common = {"schema": 1, "run": "r", "time": "2026-11-20T07:24:41.536532Z", "mono": 1.0}
    text = "".join(json.dumps({**common, "seq": i, **e}) + "\n" for i, e in enumerate(events))
    (tmp_path / "run.events.jsonl").write_text(text)
    random = np.random.default_rng(0)
    loss = 2 + random.normal(0, 0.1, ROWS)
    loss[SPIKE] = 9.0
    steps = [*range(BACK), *range(TO, ROWS - BACK + TO)]
    with (tmp_path / "run.metrics.jsonl").open("w") as file:
        for row, step in enumerate(steps):
            value = '"nan"' if row == NAN else f"{loss[row]:.6f}"
            file.write(
                f'{{"schema":1,"kind":"step","run":"r","step":{step},"loss":{value},'
                '"grad_norm":1.0,"threshold":0.0,"lr_scale":1.0,"cause":[],"action":[]}\n'
            )
    return tmp_path / "run.events.jsonl"


def test_outliers_stay(long):
    tracemalloc.start()
    (report,) = read_reports(long)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 14e6  # the file has 5 MB as text, and some 40 MB as objects
    series = report.curves
    assert series.rows == ROWS
    assert 1000 < len(series.step) <= 9000
    assert series.attempt is not None
    assert series.nonfinite is not None
    assert (series.loss == 9.0).sum() == 1
    assert series.nonfinite.sum() == 1
    assert series.threshold is None  # 0 stands for none in force
    assert (series.step[0], series.step[-1]) == (0, ROWS - 1 - BACK + TO)
    # The place where it went back is sharp.
    assert series.step[series.attempt == 1][0] == TO
    assert series.step[series.undone()].min() >= TO


def test_a_picture_of_anything():
    step = np.arange(100.0)
    nan, ones = np.full(100, np.nan), np.ones(100)
    odd = [
        Curves(step, np.sin(step)),
        Curves(step, nan, nonfinite=np.ones(100, bool), grad_norm=nan),
        Curves(step, np.where(step == 5, np.inf, 1e30), grad_norm=ones, threshold=ones),
        Curves(step[:1], ones[:1], lr_scale=ones[:1]),
    ]
    for report in (*(hostile()._replace(curves=curves) for curves in odd), empty()):
        assert draw(report).startswith(b"\x89PNG")
