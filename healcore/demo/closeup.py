"""The third act, closer: every attempt of the healed run at the steps that ruin the others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from healcore.demo.history import History, column
from healcore.demo.panels import COLOURS, UNDONE
from healcore.demo.scenario import Scenario

_AROUND = 14
"""Steps shown before the first checkpoint and after the wrong learning rate."""
_TOP = 9.0


def draw(axis: Any, runs: Sequence[History], scenario: Scenario) -> None:
    """Draws the first seed's unprotected and healed run, by step: attempts lie on one another.

    Args:
        axis: where.
        runs: of one framework.
        scenario: the first seed's.
    """
    wrong = scenario.mistaken
    plain, healed = (
        next((run for run in runs if run.arm == arm), None) for arm in ("unprotected", "healed")
    )
    begins = [back.checkpoint for back in healed.rollbacks] if healed else []
    first, last = min([*begins, wrong.start]) - _AROUND, wrong.stop + _AROUND
    axis.set_xlim(max(first, 0), min(last, scenario.steps - 1))
    axis.set_ylim(1.7, _TOP)
    axis.axvspan(wrong.start, wrong.stop, color="#CC79A7", alpha=0.16, lw=0)
    axis.set_title("Act 3, closer", fontsize=11, weight="bold", loc="left")
    axis.set_xlabel("step")
    lines = []
    if plain is not None:
        colour = COLOURS["unprotected"]
        axis.plot(column(plain.steps, "step"), plain.column("loss"), color=colour, lw=1.4)
        lines.append(("unprotected", colour))
    if healed is not None:
        lines += _attempts(axis, healed)
    for row, (words, colour) in enumerate(lines):
        axis.annotate(
            words,
            (wrong.start + 9, _TOP - 0.55),
            xytext=(0, -16 * row),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
            color=colour,
            in_layout=False,
            bbox={"fc": "white", "ec": "none", "alpha": 0.8, "pad": 1.0},
            zorder=9,
        )


def _attempts(axis: Any, healed: History) -> list[tuple[str, str]]:
    """Draws each attempt and the way from its end to the next; says what they are."""
    colour = COLOURS["healed"]
    axis.plot(
        column(healed.kept, "step"), column(healed.kept, "loss"), color=colour, lw=1.9, zorder=5
    )
    for branch in healed.given_up:
        axis.plot(column(branch, "step"), column(branch, "loss"), color=UNDONE, lw=1.3, zorder=4)
    for number, (branch, after) in enumerate(itertools.pairwise(healed.branches), 1):
        end, begin = (branch[-1].step, _within(branch[-1].loss)), (after[0].step, after[0].loss)
        arrow = {
            "arrowstyle": "-|>",
            "color": colour,
            "lw": 1.2,
            "ls": (0, (4, 2)),
            "shrinkB": 4,
            "connectionstyle": "arc3,rad=0.2",
        }
        axis.annotate("", begin, end, arrowprops=arrow, zorder=7)
        axis.plot(*begin, "o", color=colour, ms=6, mec="white", zorder=8)
        axis.annotate(
            f" {number}", end, va="center", fontsize=10, weight="bold", color=colour, zorder=8
        )
    said = [
        (f"{number}  step {back.onset}: back to step {back.checkpoint}, LR × {back.lr_scale:g}")
        for number, back in enumerate(healed.rollbacks, 1)
    ]
    if said and healed.ending == "completed":
        said.append(f"{len(said) + 1}  goes on to the end")
    return [(words, colour) for words in said]


def _within(loss: float) -> float:
    """A loss as high as the panel shows it; NaN is at the top."""
    return min(loss, _TOP - 0.3) if math.isfinite(loss) else _TOP - 0.3
