"""What is drawn in the panels of the picture: the runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from healcore.core.verdict import Action
from healcore.demo.history import History, Step, column
from healcore.demo.scenario import Scenario
from healcore.demo.table import number

# Okabe and Ito's colours: told apart by the colour-blind too.
COLOURS = {"unprotected": "#D55E00", "fixed clip": "#E69F00", "healed": "#0072B2"}
_LABELS = {
    "unprotected": "unprotected",
    "fixed clip": "gradient norm clipped to 1.0",
    "healed": "healed",
}
UNDONE = "#56B4E9"
"""Steps of a healed run that going back has undone."""
Curve = Callable[[Sequence[Step]], np.ndarray]
INFINITE = 1e20
"""Where an infinite norm is drawn: beyond it a float32 sum of squares overflows."""


def losses(axis: Any, runs: Sequence[History], scenario: Scenario) -> None:
    """The training losses, and the final ones in words."""
    for history, bold in _in_order(runs):
        steps = [step for step in history.kept if np.isfinite(step.loss)]
        style = _style(history, bold)
        axis.plot(column(steps, "batch"), column(steps, "loss"), **style)
        # The end of a run whose parameters are NaN: what follows its last loss is not there.
        if bold and history.arm != "healed" and steps and steps[-1] != history.kept[-1]:
            end = (steps[-1].batch, steps[-1].loss)
            axis.plot(*end, "X", color=style["color"], ms=9, mec="white", zorder=6)
        if bold:
            _undone(axis, history, lambda steps: column(steps, "loss"), named=True)
    corpus = scenario.corpus
    for level, words in (
        (corpus.byte_frequency_loss, "byte frequencies alone"),
        (corpus.byte_pair_loss, "byte pairs alone"),
    ):
        axis.axhline(level, color="#777777", lw=0.9, ls=(0, (5, 3)), zorder=1)
        axis.text(
            scenario.steps * 0.995,
            level,
            words,
            ha="right",
            va="bottom",
            fontsize=8,
            color="#555555",
            bbox={"fc": "white", "ec": "none", "alpha": 0.75, "pad": 0.6},
            zorder=7,
        )
    _finals(axis, [history for history, bold in _in_order(runs) if bold])


def _finals(axis: Any, runs: Sequence[History]) -> None:
    """The last word on each run, where no curve passes: right of the second random bytes."""
    lines = [("on unseen text:", "#333333")]
    for history in runs:
        words = f"{history.arm} {number(history.held_out_loss)}"
        lines.append((words, COLOURS[history.arm]))
    for row, (words, colour) in enumerate(lines):
        axis.annotate(
            words,
            (0.985, 5.55),
            xycoords=("axes fraction", "data"),
            xytext=(0, -15 * row),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=10,
            weight="bold" if row else "normal",
            color=colour,
            bbox={"fc": "white", "ec": "none", "pad": 1.0},
            zorder=7,
        )


def norms(axis: Any, runs: Sequence[History]) -> None:
    """The gradients' norms."""
    for history, bold in _in_order(runs):
        _plot(axis, history, bold, _norm)


def rates(axis: Any, runs: Sequence[History]) -> None:
    """The learning rate as scheduled, with its mistake, and as it was in force."""
    for history, bold in _in_order(runs):
        if history.arm != "healed":
            continue
        if bold:
            steps = history.kept
            schedule, rate = column(steps, "learning_rate"), _rate(steps)
            axis.plot(column(steps, "batch"), schedule, color="#888888", lw=1.4)
            _name(axis, 0.80, steps, schedule, "as scheduled", "#777777", above=True)
            _name(axis, 0.66, steps, rate, "healed", COLOURS["healed"], above=False)
        _plot(axis, history, bold, _rate)


def deeds(axis: Any, runs: Sequence[History]) -> None:
    """One row of ticks per kind of healing."""
    healed = next((history for history in runs if history.arm == "healed"), None)
    rows = ("left out", "rollback", "LR cut", "skip", "clip")
    axis.set_yticks(range(len(rows)), rows)
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.grid(False)
    if healed is None:
        return
    steps = healed.steps
    at = (
        [index for back in healed.rollbacks for index in back.batches],
        [branch[-1].batch for branch in healed.given_up],
        [one.batch for one in steps if one.action & Action.CUT_LR],
        [one.batch for one in steps if one.skip],
        [one.batch for one in steps if one.grad_scale < 1 and not one.skip],
    )
    for row, where in enumerate(at):
        axis.vlines(where, row - 0.36, row + 0.36, color=COLOURS["healed"], lw=1.6)


# -- how a run is drawn ---------------------------------------------------------------------------


def _plot(axis: Any, history: History, bold: bool, what: Curve) -> None:
    """A run's curve, and of a bold one what going back has undone."""
    steps = history.kept
    axis.plot(column(steps, "batch"), what(steps), **_style(history, bold))
    if bold:
        _undone(axis, history, what)


def _undone(axis: Any, history: History, what: Curve, *, named: bool = False) -> None:
    for order, branch in enumerate(history.given_up):
        label = "healed: undone by going back" if named and not order else None
        axis.plot(
            column(branch, "batch"), what(branch), color=UNDONE, lw=1.3, zorder=4, label=label
        )


def _norm(steps: Sequence[Step]) -> np.ndarray:
    norm = column(steps, "grad_norm")
    return np.where(norm > INFINITE, INFINITE, np.where(norm > 0, norm, np.nan))


def _rate(steps: Sequence[Step]) -> np.ndarray:
    return column(steps, "learning_rate") * column(steps, "lr_scale")


def _name(
    axis: Any,
    part: float,
    steps: Sequence[Step],
    curve: np.ndarray,
    words: str,
    colour: str,
    *,
    above: bool,
) -> None:
    """Writes a curve's name beside it, `part` of the way along."""
    index = int(part * len(curve))
    axis.annotate(
        words,
        (steps[index].batch, curve[index]),
        xytext=(0, 3 if above else -3),
        textcoords="offset points",
        va="bottom" if above else "top",
        fontsize=8.5,
        color=colour,
    )


def _in_order(runs: Sequence[History]) -> list[tuple[History, bool]]:
    """Healed last, so that it lies on top; the first seed of each is bold."""
    first = runs[0].seed
    order = list(COLOURS)
    return [
        (history, history.seed == first)
        for history in sorted(runs, key=lambda one: (order.index(one.arm), one.seed != first))
    ]


def _style(history: History, bold: bool) -> dict[str, Any]:
    on_top = history.arm == "healed"
    return {
        "color": COLOURS[history.arm],
        "lw": (1.9 if on_top else 1.4) if bold else 0.7,
        "alpha": 1.0 if bold else 0.4,
        "zorder": 5 if on_top else 3,
        "label": _LABELS[history.arm] if bold else None,
    }
