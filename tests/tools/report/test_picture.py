"""Other runs drawn behind a run, for comparison."""

from __future__ import annotations

import numpy as np
from matplotlib import image
from matplotlib.colors import to_rgb

from healcore.history import Curves
from healcore.tools.report.picture import Backdrop, draw
from healcore.tools.report.runs import read_reports


def pixels(path, colour: str) -> int:
    """How many elements have this colour."""
    found = image.imread(path)[..., :3]
    return int((np.abs(found - to_rgb(colour)) < 0.01).all(axis=-1).sum())


def test_other_runs_are_drawn_behind_the_run_of_that_title(healed, tmp_path):
    (report,) = read_reports(healed)
    last = int(report.curves.step[-1])
    loss = np.where(np.arange(last) < last // 2, 1e6, np.nan)
    backdrop = Backdrop(
        {"first": Curves(np.arange(last), loss), "second": Curves(np.arange(last), 10 * loss)},
        [(10, 20, "a fault"), (30, 30, "another")],
        label="this one",
    )
    counted = {}
    for title in ("the run", "another run"):
        path = tmp_path / f"{title}.png"
        draw([report._replace(title="the run")], path, backdrops={title: backdrop})
        counted[title] = [pixels(path, colour) for colour in ("#3D3D3D", "#E69F00")]
    assert counted["another run"][1] == 0
    assert counted["the run"][1] > 40  # the lines are smoothed, the crosses at their ends are not
    assert counted["the run"][0] > counted["another run"][0] + 40
