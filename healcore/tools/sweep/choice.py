"""Chooses a setting, and validates the choice on runs that were held out.

The best of thousands of settings is partly luck. So each score is averaged with the scores of the
nearest settings. Settings with an average close to the best average form the plateau. The choice is
the setting of the plateau with the smallest mean distance to the others, so that a number without
effect stays near the middle of its range. Traces are held out by family, so that no seed of a
recipe is on both sides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from healcore.tools.sweep.scores import OrderCounts, Rates, rates, score

_MAX_WORSE = 0.25  # fraction of splits in which the choice may score worse than the base
_NEIGHBOURS = 8  # includes the setting itself
_PLATEAU_WIDTH = 0.1  # as a fraction of best score minus median score
_BLOCK = 256  # number of settings whose distances are computed at a time
_NUMBERED = re.compile(r"[0-9A-Za-z]*\d[0-9A-Za-z]*")

SPLITS = 8
"""Number of splits. The validation reports means over the splits."""


class SplitScores(NamedTuple):
    """Mean scores of one setting on the training and the held-out runs."""

    train: float
    held_out: float

    @property
    def gap(self) -> float:
        """Training score minus held-out score."""
        return self.train - self.held_out


class Validation(NamedTuple):
    """Mean scores over the splits. Each split makes a choice from its training runs."""

    base: SplitScores
    chosen: SplitScores
    best: SplitScores
    """Setting with the best training score, which shows the effect of overfitting."""
    worse: int
    """Number of splits in which the choice scores below the base policy on the held-out runs."""
    splits: int
    events: tuple[int, ...]
    """Number of held-out events in each split."""
    ever_held_out: int
    """Number of events that are held out in at least one split."""


class SweepChoice(NamedTuple):
    """The decision. `scores` (variants,) and `rates` are of all variants on all runs."""

    choice: Choice
    scores: np.ndarray
    rates: Rates
    validation: Validation | None
    """Validation of the choice, or None without held-out runs."""
    take: int
    """Index of the setting to take: the choice, or 0 for the base policy."""
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
    """Chooses a setting on all runs, and validates the choice on the splits.

    `counts` has one entry per series. `wanted` is False if the user disabled the validation.
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
            split_choice = choose(units, train)
            settings = (0, split_choice.index, split_choice.best)
            rows.append([[side[i] for i in settings] for side in (train, test)])
            worse += bool(test[split_choice.index] < test[0])
        mean = np.mean(rows, axis=0)
        base, chosen, best = (SplitScores(float(train), float(test)) for train, test in mean.T)
        events = np.array([each.events for each in counts])
        per_split = tuple(int(events[held].sum()) for held in splits.held)
        ever = int(events[np.any(splits.held, axis=0)].sum())
        validation = Validation(base, chosen, best, worse, len(splits.held), per_split, ever)
    take, reason = _decide(choice, scores, validation, objective, wanted=wanted)
    return SweepChoice(choice, scores, whole, validation, take, reason)


def _decide(
    choice: Choice,
    scores: np.ndarray,
    validation: Validation | None,
    objective: str,
    *,
    wanted: bool,
) -> tuple[int, str]:
    """Returns the setting to take, and the reason with any missing validation."""
    unchecked = _why_unchecked(validation, objective, wanted=wanted)
    also = f". {unchecked[0].upper()}{unchecked[1:]}" if unchecked else ""
    if scores.max() == scores.min():
        return 0, f"keep the base policy: all settings have the same score{also}"
    if choice.index == 0:
        return 0, f"keep the base policy: it is in the middle of the plateau{also}"
    if scores[choice.index] <= scores[0]:
        return 0, f"keep the base policy: the middle of the plateau scores no better{also}"
    if unchecked and wanted:
        return 0, f"keep the base policy: {unchecked}"
    if validation is None:
        return choice.index, f"take the new setting, but {unchecked}"
    if validation.chosen.held_out <= validation.base.held_out:
        return 0, (
            "keep the base policy: settings chosen on the training runs scored no better on the "
            "held-out runs"
        )
    if validation.worse > _MAX_WORSE * validation.splits:
        return 0, (
            f"keep the base policy: in {validation.worse} of {validation.splits} splits the "
            "chosen setting scored worse on the held-out runs"
        )
    return choice.index, "take the new setting: it also scored better on held-out runs"


def _why_unchecked(validation: Validation | None, objective: str, *, wanted: bool) -> str:
    """Reason why the choice cannot be validated, or an empty string."""
    if not wanted:
        return "no runs were held out (--holdout 0): on other runs it may score worse"
    # Runs without events are enough to validate the objective "false".
    if validation is not None and (validation.ever_held_out or objective == "false"):
        return ""
    return (
        "no split held out an event, so the choice cannot be checked. Pass traces of more runs, at "
        "least two with events"
    )


class Choice(NamedTuple):
    """A setting and its plateau."""

    index: int
    best: int
    """Index of the setting with the best score."""
    plateau: np.ndarray
    """bool (variants,): whether the setting is on the plateau."""
    smooth: np.ndarray
    """float64 (variants,): scores averaged over neighbours."""


def choose(units: np.ndarray, scores: np.ndarray) -> Choice:
    """Chooses a setting by the scores (variants,), where larger is better.

    `units` (variants, axes) has the settings in the unit cube, the base policy first.
    """
    smooth = _smooth_scores(units, scores)
    top = smooth.max()
    close = top - _PLATEAU_WIDTH * (top - np.median(smooth))
    plateau = smooth >= close
    members = units[plateau]
    distance = np.concatenate(
        [
            np.sqrt(_distances(members[i : i + _BLOCK], members)).mean(axis=1)
            for i in range(0, len(members), _BLOCK)
        ]
    )
    # A setting whose own score is also close to the best is preferred.
    own = scores[plateau] >= close
    order = np.lexsort((distance, ~own))
    index = int(np.flatnonzero(plateau)[order[0]])
    return Choice(index, int(scores.argmax()), plateau, smooth)


def _smooth_scores(units: np.ndarray, scores: np.ndarray) -> np.ndarray:
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
    """Held-out series of each split."""

    held: tuple[np.ndarray, ...]
    """bool (series,) for each split; empty if no series can be held out."""
    by: str
    """Unit that is held out as a whole: "family", "run", or "" without held-out series."""
    families: int
    """Number of families."""
    only_eventful: str = ""
    """A run of the only family with events, whose runs are held out separately, or ""."""


def family_of(name: str) -> str:
    """Returns the name of a trace with `#` for each part that contains a digit.

    `runs/seed_3.csv` and `runs/seed_12.csv` are one family. Two folders are two families.
    """
    return _NUMBERED.sub("#", name)


def split(runs: Sequence[str], has_events: Sequence[bool], share: float, seed: int) -> Splits:
    """Draws the splits; `share` is the fraction of families to hold out, or 0.

    Families with and without events are drawn separately, at least one of two or more each, so that
    both sides have runs with and without events. If only one family has events, its runs are drawn
    separately. Attempts of one run (equal names in `runs`) are always on one side.
    """
    families = [family_of(run) for run in runs]
    count = len(set(families))
    eventful = {name for name, has in zip(families, has_events, strict=True) if has}
    divided = eventful if len(eventful) == 1 else set(families) if count == 1 else set()
    by = "run" if divided else "family"
    keys = [run if name in divided else name for run, name in zip(runs, families, strict=True)]
    with_events = {key for key, has in zip(keys, has_events, strict=True) if has}
    groups = [sorted(with_events), sorted(set(keys) - with_events)]
    if share <= 0 or all(len(group) < 2 for group in groups):
        return Splits((), "", count)
    random = np.random.default_rng(seed)
    held = []
    for _ in range(SPLITS):
        held_keys: set[str] = set()
        for group in groups:
            if len(group) >= 2:
                size = min(max(1, round(share * len(group))), len(group) - 1)
                held_keys |= set(random.choice(group, size, replace=False).tolist())
        held.append(np.array([key in held_keys for key in keys]))
    only = ""
    if count > 1 and len(with_events) >= 2 and by == "run":
        only = next(run for run, name in zip(runs, families, strict=True) if name in divided)
    return Splits(tuple(held), by, count, only)
