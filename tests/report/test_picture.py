"""What is drawn behind a story, to compare it with other runs."""

from __future__ import annotations

import numpy as np
from matplotlib import image
from matplotlib.colors import to_rgb

from healcore.tools.report.picture import Backdrop, draw
from healcore.tools.report.story import Series
from healcore.tools.report.telling import tell


def pixels(path, colour: str) -> int:
    """How many have this colour."""
    found = image.imread(path)[..., :3]
    return int((np.abs(found - to_rgb(colour)) < 0.01).all(axis=-1).sum())


def test_other_runs_are_drawn_behind_the_story_of_that_title(healed, tmp_path):
    (story,) = tell(healed).stories
    last = int(story.series.step[-1])
    loss = np.where(np.arange(last) < last // 2, 1e6, np.nan)
    backdrop = Backdrop(
        {"first": Series(np.arange(last), loss), "second": Series(np.arange(last), 10 * loss)},
        [(10, 20, "a fault"), (30, 30, "another")],
        itself="this one",
    )
    counted = {}
    for title in ("the story", "another story"):
        path = tmp_path / f"{title}.png"
        draw([story._replace(title="the story")], path, behind={title: backdrop})
        counted[title] = [pixels(path, colour) for colour in ("#3D3D3D", "#E69F00")]
    assert counted["another story"][1] == 0
    assert counted["the story"][1] > 40  # the lines are smoothed, the crosses at their ends are not
    assert counted["the story"][0] > counted["another story"][0] + 40
