"""Chooses a setting, and checks whether such a choice holds on runs that it was not chosen by.

The best of thousands of settings is partly luck. So each score is averaged with the scores of
the nearest settings. Settings with an average close to the best form the plateau; the one with the
smallest mean distance to the others is chosen, so that a number without effect stays near the
middle of its range. Traces are held out by family, so that no seed of a recipe is on both sides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from healcore.tools.sweep.scores import OrderCounts, Rates, rates, score

_MOST_WORSE = 0.25  # largest fraction of splits in which the choice may do worse than the base
_NEIGHBOURS = 8  # the setting itself included
_CLOSE = 0.1  # width of the plateau, as a fraction of best score minus median score
_BLOCK = 256  # settings whose distances are computed at a time
_NUMBERED = re.compile(r"[0-9A-Za-z]*\d[0-9A-Za-z]*")

SPLITS = 8
"""Number of splits; means over them are reported."""


class Standing(NamedTuple):
    """Mean scores of one setting on the training and the held-out runs."""

    train: float
    held_out: float

    @property
    def gap(self) -> float:
        """How much better it scored on the training runs."""
        return self.train - self.held_out


class Validation(NamedTuple):
    """Means over the splits; each split chooses again on its training side alone."""

    base: Standing
    chosen: Standing
    best: Standing
    """The setting with the best training score, to show the effect of over-fitting."""
    worse: int
    """Splits in which the choice did worse on the held-out runs than the base policy."""
    splits: int
    events: tuple[int, ...]
    ever: int
    """Events that were held out in some split."""


class SweepChoice(NamedTuple):
    """The decision; `scores` (variants,) and `rates` are of all variants on all runs."""

    choice: Choice
    scores: np.ndarray
    rates: Rates
    validation: Validation | None
    """The validation, or None if nothing could be held out."""
    take: int
    """The setting to take: the choice, or 0, the base policy."""
    reason: str


def choose_policy(
    counts: Sequence[OrderCounts],
    units: np.ndarray,
    splits: Splits,
    objective: str,
    price: float,
    *,
    wanted: bool = True,
) -> SweepChoice:
    """Chooses on all runs, and validates the choice on the splits.

    `counts` has one entry per series; `wanted` is False if the user asked to hold out nothing.
    """
    whole = rates(counts)
    scores = score(whole, objective, price)
    choice = choose(units, scores)
    validation = None
    if splits.held:
        rows, worse = [], 0
        for held in splits.held:
            train, test = (
                score(rates([counts[i] for i in np.flatnonzero(part).tolist()]), objective, price)
                for part in (~held, held)
            )
            picked = choose(units, train)
            rows.append([(s[0], s[picked.index], s[picked.best]) for s in (train, test)])
            worse += bool(test[picked.index] < test[0])
        mean = np.mean(rows, axis=0)
        base, chosen, best = (Standing(float(a), float(b)) for a, b in mean.T)
        events = np.array([c.events for c in counts])
        each = tuple(int(events[held].sum()) for held in splits.held)
        ever = int(events[np.any(splits.held, axis=0)].sum())
        validation = Validation(base, chosen, best, worse, len(splits.held), each, ever)
    take, reason = _decided(choice, scores, validation, objective, wanted=wanted)
    return SweepChoice(choice, scores, whole, validation, take, reason)


def _decided(
    choice: Choice,
    scores: np.ndarray,
    validation: Validation | None,
    objective: str,
    *,
    wanted: bool,
) -> tuple[int, str]:
    """The setting to take, and the reason, which always names what could not be checked."""
    unchecked = _unchecked(validation, objective, wanted=wanted)
    also = f". {unchecked[0].upper()}{unchecked[1:]}" if unchecked else ""
    if scores.max() == scores.min():
        return 0, f"keep the base policy: all settings score alike: nothing was learnt{also}"
    if choice.index == 0:
        return 0, f"keep the base policy: it lies in the middle of the plateau{also}"
    if scores[choice.index] <= scores[0]:
        return 0, f"keep the base policy: the plateau's middle scores no better{also}"
    if unchecked and wanted:
        return 0, f"keep the base policy: {unchecked}"
    if validation is None:
        return choice.index, f"take the new setting, but {unchecked}"
    if validation.chosen.held_out <= validation.base.held_out:
        return 0, (
            "keep the base policy: settings chosen on some runs did no better than it on the runs "
            "held out"
        )
    if validation.worse > _MOST_WORSE * validation.splits:
        return 0, (
            f"keep the base policy: in {validation.worse} of {validation.splits} splits the "
            "setting chosen did worse than it on the runs held out"
        )
    return choice.index, "take the new setting: it holds on runs that it was not chosen by"


def _unchecked(validation: Validation | None, objective: str, *, wanted: bool) -> str:
    """Why the held-out runs cannot check a choice; empty if they can."""
    if not wanted:
        return "nothing was held out (--holdout 0): on other runs it may do worse"
    # Runs without events are enough to check for fewer false recoveries.
    if validation is not None and (validation.ever or objective == "false"):
        return ""
    return (
        "no event was ever held out: cannot be checked. Give traces of more runs, two with events "
        "at least"
    )


class Choice(NamedTuple):
    """A setting and the plateau that it lies on."""

    index: int
    best: int
    """The setting with the best score of its own."""
    plateau: np.ndarray
    """bool (variants,)."""
    smooth: np.ndarray
    """float64 (variants,): scores averaged with their neighbours'."""


def choose(units: np.ndarray, scores: np.ndarray) -> Choice:
    """Picks a setting by its scores (variants,), larger is better.

    `units` is (variants, axes) in the unit cube, the base policy first.
    """
    smooth = _smoothed(units, scores)
    top = smooth.max()
    close = top - _CLOSE * (top - np.median(smooth))
    plateau = smooth >= close
    members = units[plateau]
    off_middle = np.concatenate(
        [
            np.sqrt(_distances(members[i : i + _BLOCK], members)).mean(axis=1)
            for i in range(0, len(members), _BLOCK)
        ]
    )
    # The setting's own score should be good too, not only its neighbours'.
    own = scores[plateau] >= close
    order = np.lexsort((off_middle, ~own))
    index = int(np.flatnonzero(plateau)[order[0]])
    return Choice(index, int(scores.argmax()), plateau, smooth)


def _smoothed(units: np.ndarray, scores: np.ndarray) -> np.ndarray:
    count = min(_NEIGHBOURS, len(units))
    smooth = np.empty(len(units))
    for start in range(0, len(units), _BLOCK):
        part = slice(start, start + _BLOCK)
        near = np.argpartition(_distances(units[part], units), count - 1, axis=1)[:, :count]
        smooth[part] = scores[near].mean(axis=1)
    return smooth


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Squared distances, (len(a), len(b))."""
    return ((a[:, None, :] - b[None, :, :]) ** 2).sum(axis=-1)


class Splits(NamedTuple):
    """Which series are held out in each split."""

    held: tuple[np.ndarray, ...]
    """bool (series,), one per split; empty if nothing can be held out."""
    by: str
    """What is kept together: "family", "run", or "" if nothing is held out."""
    families: int
    alone: str = ""
    """A run of the only one of several families with events: its runs are held out one by one."""


def family(name: str) -> str:
    """The name of a trace, with `#` for each part that has a digit.

    `runs/seed_3.csv` and `runs/seed_12.csv` are one family; the folders of two recipes are two.
    """
    return _NUMBERED.sub("#", name)


def split(runs: Sequence[str], has_events: Sequence[bool], share: float, seed: int) -> Splits:
    """Draws the splits; `share` of the families is held out, 0 for none.

    Families with and without events are drawn separately, at least one of each if there are two, so
    that both sides have events to find and runs without. If only one family has events, its runs
    are drawn one by one, so that both sides get some. Attempts of one run (equal names in `runs`)
    are never on both sides.
    """
    families = [family(run) for run in runs]
    count = len(set(families))
    eventful = {each for each, has in zip(families, has_events, strict=True) if has}
    apart = eventful if len(eventful) == 1 else set(families) if count == 1 else set()
    by = "run" if apart else "family"
    keys = [run if each in apart else each for run, each in zip(runs, families, strict=True)]
    with_events = {key for key, has in zip(keys, has_events, strict=True) if has}
    groups = [sorted(with_events), sorted(set(keys) - with_events)]
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
    if count > 1 and len(with_events) >= 2 and by == "run":
        alone = next(run for run, each in zip(runs, families, strict=True) if each in apart)
    return Splits(tuple(held), by, count, alone)
