"""What a sweep found: the setting to take, and how much of it to believe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from healcore.tools.sweep.choosing import Choice, choose
from healcore.tools.sweep.objective import Rates, rates, score
from healcore.tools.sweep.scoring import Tally
from healcore.tools.sweep.splitting import Splits

_OFTEN = 0.25  # of the splits in which a setting may do worse than the base policy


class Standing(NamedTuple):
    """One setting: scored on what it was chosen by, and on what was held out."""

    train: float
    held_out: float

    @property
    def gap(self) -> float:
        """How much better it looked than it was."""
        return self.train - self.held_out


class Validation(NamedTuple):
    """Means over the splits, the choice made anew in each by its training side alone."""

    base: Standing
    chosen: Standing
    """The middle of the plateau."""
    best: Standing
    """The single best, for comparison: what over-fitting would have given."""
    worse: int
    """Splits in which the choice did worse on the held-out runs than the base policy."""
    splits: int
    events: tuple[int, ...]
    """Events held out, of each split."""
    ever: int
    """Events that were held out in some split."""


class Verdict(NamedTuple):
    """What to do."""

    choice: Choice
    scores: np.ndarray
    """float64 (variants,): on all runs."""
    rates: Rates
    """Of all variants on all runs."""
    validation: Validation | None
    """None where nothing could be held out."""
    take: int
    """The setting to take: the choice, or 0, the base policy."""
    reason: str
    """In words."""


def judge(
    tallies: Sequence[Tally],
    units: np.ndarray,
    splits: Splits,
    objective: str,
    price: float,
    *,
    wanted: bool = True,
) -> Verdict:
    """Chooses on all runs, and asks the splits whether such a choice holds on runs not seen.

    Args:
        tallies: one per series.
        units: (variants, axes), as `choose` takes them.
        splits: what is held out.
        objective: one of `OBJECTIVES`.
        price: see `score`.
        wanted: False where the user asked for nothing to be held out.
    """

    def scored(part: Sequence[Any]) -> np.ndarray:
        return score(rates(part), objective, price)

    whole = rates(tallies)
    scores = score(whole, objective, price)
    choice = choose(units, scores)
    validation = None
    if splits.held:
        rows, worse = [], 0
        for held in splits.held:
            train = scored([t for t, out in zip(tallies, held, strict=True) if not out])
            test = scored([t for t, out in zip(tallies, held, strict=True) if out])
            picked = choose(units, train)
            rows.append([(s[0], s[picked.index], s[picked.best]) for s in (train, test)])
            worse += bool(test[picked.index] < test[0])
        mean = np.mean(rows, axis=0)
        base, chosen, best = (Standing(float(a), float(b)) for a, b in mean.T)
        events = np.array([t.events for t in tallies])
        each = tuple(int(events[held].sum()) for held in splits.held)
        ever = int(events[np.any(splits.held, axis=0)].sum())
        validation = Validation(base, chosen, best, worse, len(splits.held), each, ever)
    take, reason = _decided(choice, scores, validation, objective, wanted=wanted)
    return Verdict(choice, scores, whole, validation, take, reason)


def _decided(
    choice: Choice,
    scores: np.ndarray,
    validation: Validation | None,
    objective: str,
    *,
    wanted: bool,
) -> tuple[int, str]:
    """The setting to take, and why. What could not be checked is said whatever is decided."""
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
    if validation.worse > _OFTEN * validation.splits:
        return 0, (
            f"keep the base policy: in {validation.worse} of {validation.splits} splits the "
            "setting chosen did worse than it on the runs held out"
        )
    return choice.index, "take the new setting: it holds on runs that it was not chosen by"


def _unchecked(validation: Validation | None, objective: str, *, wanted: bool) -> str:
    """Why no held-out run can speak for a choice; empty where they can."""
    if not wanted:
        return "nothing was held out (--holdout 0): on other runs it may do worse"
    # Fewer false recoveries can be checked on calm runs alone.
    if validation is not None and (validation.ever or objective == "false"):
        return ""
    return (
        "no event was ever held out: cannot be checked. Give traces of more runs, two with events "
        "at least"
    )
