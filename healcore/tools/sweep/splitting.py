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
    """Which runs are held out, several times over."""

    held: tuple[np.ndarray, ...]
    """bool (runs,), one per split; empty where nothing can be held out."""
    by: str
    """What is kept together: "family", "run", or "" where nothing is held out."""
    families: int


def family(name: str) -> str:
    """The name of a trace without what numbers it: words with a digit in them do not count.

    `runs/seed_3.csv` and `runs/seed_12.csv` are one family, two recipes' folders are two.
    """
    return _NUMBERED.sub("#", name)


def split(families: Sequence[str], has_events: Sequence[bool], share: float, seed: int) -> Splits:
    """Draws the splits.

    Families with events and families without are drawn apart, at least one of each where there
    are two, so that both sides have something to find and something to leave alone.

    Args:
        families: of each run.
        has_events: of each run.
        share: of the families to hold out, in (0, 1); 0 holds nothing out.
        seed: of the draw.
    """
    names = list(dict.fromkeys(families))
    by, keys = "family", list(families)
    if len(names) < 2:
        by, keys = "run", [str(i) for i in range(len(families))]
    eventful = {key for key, has in zip(keys, has_events, strict=True) if has}
    groups = [sorted(eventful), sorted(set(keys) - eventful)]
    if share <= 0 or all(len(group) < 2 for group in groups):
        return Splits((), "", len(names))
    random = np.random.default_rng(seed)
    held = []
    for _ in range(SPLITS):
        out: set[str] = set()
        for group in groups:
            if len(group) >= 2:
                count = min(max(1, round(share * len(group))), len(group) - 1)
                out |= set(random.choice(group, count, replace=False).tolist())
        held.append(np.array([key in out for key in keys]))
    return Splits(tuple(held), by, len(names))
