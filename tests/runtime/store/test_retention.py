"""Which checkpoints can be deleted."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healcore.runtime.store import Keep, Saved, superfluous

CODES = {"g": "good", "c": "candidate", "a": "abandoned", "n": "candidate"}


def saves(text: str) -> list[Saved]:
    """Of "gcan": a known-good one of step 0, a candidate of step 10, …; n: one with NaN in it."""
    return [
        Saved(10 * i, CODES[code], code != "n", 1, 0.0, 1, None)  # type: ignore[arg-type]
        for i, code in enumerate(text)
    ]


@pytest.mark.parametrize(
    ("text", "keep", "dropped"),
    [
        ("", Keep(), []),
        ("ggg", Keep(good=3), []),
        ("ggggg", Keep(good=3), [0, 10]),
        ("g", Keep(good=1), []),
        ("gc", Keep(good=1), []),
        ("gaana", Keep(good=1), [10, 20, 40]),
        ("cccc", Keep(candidates=2), [10, 20]),  # the oldest is the next to be good
        ("ccc", Keep(candidates=3), []),
        ("gcccc", Keep(good=1, candidates=2), [20, 30]),
        ("nnnn", Keep(), [0, 10]),
    ],
)
def test_table(text, keep, dropped):
    assert superfluous(saves(text), keep) == dropped
    assert superfluous(list(reversed(saves(text))), keep) == dropped


def run_with(keep: Keep, steps: range) -> list[int]:
    """The checkpoints kept of a run that saves regularly and whose checkpoints all become good."""
    kept: list[Saved] = []
    for step in steps:
        kept.append(Saved(step, "good", True, 1, 0.0, 1, None))
        gone = superfluous(kept, keep)
        kept = [save for save in kept if save.step not in gone]
        assert superfluous(kept, keep) == []
    return [save.step for save in kept]


@pytest.mark.parametrize("every", [1, 100, 730])
def test_older_ones_stay_at_distances_that_grow_geometrically(every):
    left = run_with(Keep(good=3, older=True), range(0, 3000 * every, every))
    newest = left[-1]
    assert left[-3:] == [newest - 2 * every, newest - every, newest]
    assert left[0] == 0, "the run's first is the way out of any drift"
    distances = [newest - step for step in left[-2::-1]]
    assert all(b <= 4 * a for a, b in itertools.pairwise(distances))
    assert len(left) <= 3 + math.log2(newest / every) + 1


@given(st.text("gcan", max_size=12), st.integers(1, 4), st.integers(2, 4))
def test_always(text, good, candidates):
    everything, keep = saves(text), Keep(good, candidates)
    dropped = superfluous(everything, keep)
    left = [save for save in everything if save.step not in dropped]
    assert len(left) <= keep.most + 2
    newest_good = [save for save in everything if save.status == "good"][-1:]
    assert all(save in left for save in newest_good)
    if not newest_good:
        oldest = [s for s in everything if s.status == "candidate" and s.finite][:1]
        assert all(save in left for save in oldest)
    assert superfluous(left, keep) == []
