"""Holding traces out: by family, so that no seed of a recipe is on both sides."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_NUMBERED = re.compile(r"[0-9A-Za-z]*\d[0-9A-Za-z]*")

SPLITS = 8
"""Ways to split; what is reported is their mean."""


class Splits(NamedTuple):
    """Which series are held out, several times over."""

    held: tuple[np.ndarray, ...]
    """bool (series,), one per split; empty where nothing can be held out."""
    by: str
    """What is kept together: "family", "run", or "" where nothing is held out."""
    families: int
    alone: str = ""
    """A run of the one family among several that has events: its runs are held out singly."""


def family(name: str) -> str:
    """The name of a trace without what numbers it: words with a digit in them do not count.

    `runs/seed_3.csv` and `runs/seed_12.csv` are one family, two recipes' folders are two.
    """
    return _NUMBERED.sub("#", name)


def split(runs: Sequence[str], has_events: Sequence[bool], share: float, seed: int) -> Splits:
    """Draws the splits.

    Families with events and families without are drawn apart, at least one of each where there
    are two, so that both sides have something to find and something to leave alone. Where one
    family alone has events its runs are drawn one by one: with all of them on one side there would
    be nothing to find on the other.

    Args:
        runs: the name of each series' trace; attempts of one run are never on both sides.
        has_events: of each series.
        share: of the families to hold out, in (0, 1); 0 holds nothing out.
        seed: of the draw.
    """
    families = [family(run) for run in runs]
    count = len(set(families))
    eventful = {each for each, has in zip(families, has_events, strict=True) if has}
    apart = eventful if len(eventful) == 1 else set(families) if count == 1 else set()
    by = "run" if apart else "family"
    keys = [run if each in apart else each for run, each in zip(runs, families, strict=True)]
    lively = {key for key, has in zip(keys, has_events, strict=True) if has}
    groups = [sorted(lively), sorted(set(keys) - lively)]
    if share <= 0 or all(len(group) < 2 for group in groups):
        return Splits((), "", count)
    random = np.random.default_rng(seed)
    held = []
    for _ in range(SPLITS):
        out: set[str] = set()
        for group in groups:
            if len(group) >= 2:
                size = min(max(1, round(share * len(group))), len(group) - 1)
                out |= set(random.choice(group, size, replace=False).tolist())
        held.append(np.array([key in out for key in keys]))
    alone = ""
    if count > 1 and len(lively) >= 2 and by == "run":
        alone = next(run for run, each in zip(runs, families, strict=True) if each in apart)
    return Splits(tuple(held), by, count, alone)
