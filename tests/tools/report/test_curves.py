"""The figure of a run; the curves of a long run are thinned, and outliers are kept."""

from __future__ import annotations

import itertools
import json
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from healcore.history import Curves
from healcore.tools.report.picture import WIDTHS, draw, plot
from healcore.tools.report.run_report import read_reports
from tests.tools.report.test_page import empty, hostile

ROWS = 40_000
SPIKE, NAN, BACK, TO = 21_234, 27_777, 30_000, 25_000


@pytest.fixture
def long(tmp_path) -> Path:
    """40,000 rows with a spike, a NaN, and a rollback of 5,000 steps."""
    start = {"kind": "start", "host": "h", "pid": 1, "environment": {}, "policy": "p"}
    incident = {"kind": "incident", "step": BACK - 1, "incident": 1, "onset": BACK - 1, "cause": []}
    back = {"kind": "rollback", "step": BACK, "onset": BACK - 1, "checkpoint": TO}
    common = {"schema": 1, "run": "r", "time": "2026-11-20T07:24:41.536532Z", "mono": 1.0}
    events = enumerate([start, incident, back])
    text = "".join(json.dumps({"step": None, "seq": i, **common, **e}) + "\n" for i, e in events)
    (tmp_path / "run.events.jsonl").write_text(text)
    loss = (2 + np.random.default_rng(0).normal(0, 0.1, ROWS)).round(6).tolist()
    loss[SPIKE], loss[NAN] = 9.0, "nan"
    steps = [*range(BACK), *range(TO, ROWS - BACK + TO)]
    row = {"schema": 1, "kind": "step", "run": "r", "cause": [], "action": []}
    row |= {"grad_norm": 1.0, "threshold": 0.0, "lr_scale": 1.0}
    with (tmp_path / "run.metrics.jsonl").open("w") as file:
        for step, value in zip(steps, loss, strict=True):
            file.write(json.dumps({**row, "step": step, "loss": value}) + "\n")
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
    assert ((series.loss == 9.0).sum(), series.nonfinite.sum()) == (1, 1)
    assert series.threshold is None  # 0 stands for none in force
    assert (series.step[0], series.step[-1]) == (0, ROWS - 1 - BACK + TO)
    # The place where it went back is sharp.
    assert series.step[series.attempt == 1][0] == TO
    assert series.step[series.undone()].min() >= TO


@pytest.mark.parametrize("width", WIDTHS.values())
@pytest.mark.parametrize("run", ["healed", "stopped", "resumed"])
def test_the_figure_names_what_happened_and_no_texts_overlap(run, width, request):
    (report,) = read_reports(request.getfixturevalue(run))
    figure = Figure()
    plot(figure, report, width, {})
    FigureCanvasAgg(figure).draw()
    texts = [*figure.legends[0].get_texts(), *figure.axes[0].get_yticklabels()]
    for axis in figure.axes:
        texts += [*axis.texts, axis.xaxis.label, axis.yaxis.label]
    shown = {text.get_text() for text in texts}
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    back = [each for each in report.attempts if each.left is not None]
    arcs = {f"{each.left:.0f} → {each.first_step:.0f}" for each in back}
    assert arcs <= {re.split(",| restart", text)[0] for text in shown}
    assert {report.ending(), "optimizer step", "loss", "gradient\nnorm (L2)"} <= shown
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)
    themed = re.sub(r"var\(--c\w+, #\w+\)|:root{.*?}", "", draw(report, width))
    assert not re.findall("#[0-9a-f]{6}", themed), "each colour has one for a dark page"


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
        assert draw(report, 8.0).endswith("</svg>\n")
