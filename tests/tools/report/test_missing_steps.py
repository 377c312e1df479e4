"""Where steps are missing the curve is broken, and a note names them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from healcore.history import Curves
from healcore.tools.report import picture
from healcore.tools.report.page import plot_data, render
from healcore.tools.report.runs import read_reports
from tests.tools.report.small_runs import lines_of
from tests.tools.report.test_page import hostile


def report_of(step, **more):
    step = np.asarray(step, float)
    return hostile()._replace(curves=Curves(step, np.ones(len(step)), **more), incidents=())


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (np.r_[0:307, 400:600], ["no metrics for steps 307–399: the curves are broken there"]),
        (np.r_[0:3070:10, 4000:6000:10], ["no metrics for steps 3070–3990"]),
        (np.r_[0:300, 305:600], []),  # a few steps
        (np.r_[0:300, 300:30000:50], []),  # another stride
        (np.cumsum(np.random.default_rng(0).geometric(0.05, 500)), []),
        (np.r_[0:300, 200:500], []),  # a rollback
        ([0, 5000], []),
        ([], []),
    ],
)
def test_which_gaps_are_reported(step, expected):
    found = report_of(step).gaps()
    assert len(found) == len(expected)
    assert all(one.startswith(other) for one, other in zip(found, expected, strict=True))


def test_thinned_curves_have_no_gap_where_rows_were_left_out():
    step = np.r_[0:40_000, 41_000:80_000]
    kept = np.sort(np.random.default_rng(0).choice(len(step), 3000, replace=False))
    (gap,) = report_of(step[kept], index=kept, rows=len(step)).gaps()
    assert gap.startswith("no metrics for some 1000 steps between 39")


def lines_drawn(report, monkeypatch, tmp_path):
    """The loss as the picture draws it: x, y of every line."""
    from matplotlib.axes import Axes

    found = []

    def spy(axis, *arguments, **style):
        found.append(arguments)
        return plot(axis, *arguments, **style)

    plot = Axes.plot
    monkeypatch.setattr(Axes, "plot", spy)
    picture.draw([report], tmp_path / "a.png")
    return found


def test_metrics_that_a_kill_took(healed, tmp_path, monkeypatch):
    metrics = lines_of(healed.with_name("run.metrics.jsonl"))
    kept = [row for row in metrics if not 31 <= row["step"] < 73]
    (tmp_path / "run.events.jsonl").write_bytes(healed.read_bytes())
    text = "".join(json.dumps(row) + "\n" for row in kept)
    (tmp_path / "run.metrics.jsonl").write_text(text)
    (report,) = read_reports(tmp_path)
    assert "no metrics for steps 31–72" in render([report])
    (gap,) = plot_data(report)["gaps"]
    assert (gap["low"], gap["high"]) == (30.0, 73.0)
    assert report.curves.step[gap["row"]] == 73
    broken = []
    drawn = lines_drawn(report, monkeypatch, tmp_path)
    for step, values, *_ in (line for line in drawn if np.ndim(line[0])):
        across = np.flatnonzero((np.asarray(step)[:-1] <= 30) & (np.asarray(step)[1:] >= 73))
        broken += [bool(np.isnan(np.asarray(values, float)[i + 1])) for i in across]
    assert broken
    assert all(broken)


def test_the_log_of_another_run_is_noted(healed, tmp_path):
    (tmp_path / "log.csv").write_text(
        "step,loss\n" + "".join(f"{step},1.5\n" for step in range(9000, 9100))
    )
    (report,) = read_reports(healed, metrics=tmp_path / "log.csv")
    assert any("may be of another run" in problem for problem in report.notes)
    other = [{**row, "run": "another"} for row in lines_of(healed.with_name("run.metrics.jsonl"))]
    path = tmp_path / "other.metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in other))
    (report,) = read_reports(healed, metrics=path)
    assert any("has no line of this run" in problem for problem in report.notes)
