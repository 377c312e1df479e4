"""The picture: loss, gradient norm, learning rate and healing, one column per framework."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from healcore.core.verdict import Action
from healcore.demo.history import History
from healcore.demo.scenario import Scenario
from healcore.demo.table import number

# Okabe and Ito's colours: told apart by the colour-blind too.
_COLOURS = {"unprotected": "#D55E00", "fixed clip": "#E69F00", "healed": "#0072B2"}
_LABELS = {
    "unprotected": "unprotected",
    "fixed clip": "gradient norm clipped to 1.0",
    "healed": "healed",
}
_TITLES = {"torch": "torch", "jax": "JAX / Flax"}
_KNEE = 6.0
"""Loss up to which the axis is linear; above it decades are this wide: a run that trains and one
that ends at 1e12 are both readable."""
_DECADE = 0.28
_LOW, _HIGH = 1.7, 1e14
_INFINITE = 1e20
"""Where an infinite norm is drawn: beyond it a float32 sum of squares overflows."""


def draw(histories: Sequence[History], scenario: Scenario, path: Path) -> None:
    """Draws all runs; the first seed in full, the others thin.

    Args:
        histories: finished runs.
        scenario: the first seed's.
        path: the PNG to write.
    """
    # Here: the pictures of the demo are all that needs matplotlib. No window, whatever the backend.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    frameworks = list(dict.fromkeys(history.framework for history in histories))
    figure = Figure(figsize=(7.4 * len(frameworks) + 0.6, 9.6), layout="constrained")
    FigureCanvasAgg(figure)
    grid: Any = figure.subplots(
        4,
        len(frameworks),
        squeeze=False,
        sharex=True,
        sharey="row",
        height_ratios=(4.2, 2.2, 1.5, 1.0),
    )
    for column, framework in zip(grid.T, frameworks, strict=True):
        runs = [history for history in histories if history.framework == framework]
        _faults(column, scenario)
        _losses(column[0], runs, scenario)
        _norms(column[1], runs)
        _rates(column[2], runs)
        _deeds(column[3], runs)
        column[0].set_title(_TITLES.get(framework, framework), fontsize=15, weight="bold", pad=34)
        column[-1].set_xlabel("step")
        column[-1].set_xlim(0, scenario.steps - 1)
    _axes(grid)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    figure.align_ylabels()
    figure.savefig(path, dpi=130)


def _faults(column: Any, scenario: Scenario) -> None:
    """Bands through all panels, named once above the top one."""
    wrong, bad = scenario.mistaken, sorted(scenario.corrupted)
    bursts = [step for step in bad if step - 1 not in scenario.corrupted]
    for axis in column:
        axis.axvspan(wrong.start, wrong.stop, color="#CC79A7", alpha=0.16, lw=0)
        for step in bad:
            axis.axvspan(step - 0.5, step + 0.5, color="#555555", alpha=0.35, lw=0)
        axis.axvline(scenario.empty, color="#222222", lw=1.1, ls=(0, (2, 2)))
    said = [(float(step), "random\nbytes") for step in bursts]
    said.append(((wrong.start + wrong.stop) / 2, f"learning rate\n× {scenario.mistake:g}"))
    said.append((scenario.empty, "empty batch:\n0/0 = NaN"))
    for step, words in said:
        column[0].annotate(
            words,
            (step, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8.5,
            color="#333333",
            linespacing=1.05,
        )


def _losses(axis: Any, runs: Sequence[History], scenario: Scenario) -> None:
    for history, bold in _in_order(runs):
        steps, loss = history.column("step"), history.column("loss")
        finite = np.isfinite(loss)
        style = _style(history, bold)
        axis.plot(steps[finite], loss[finite], **style)
        dead = np.flatnonzero(~finite)
        last = np.flatnonzero(finite)
        # The end of a run whose parameters are NaN: what follows its last loss is not there.
        if bold and history.arm != "healed" and len(dead) and len(last):
            end = last[-1]
            axis.plot(steps[end], loss[end], "X", color=style["color"], ms=9, mec="white", zorder=6)
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
        lines.append((words, _COLOURS[history.arm]))
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


def _norms(axis: Any, runs: Sequence[History]) -> None:
    for history, bold in _in_order(runs):
        norm = history.column("grad_norm")
        norm = np.where(norm > _INFINITE, _INFINITE, np.where(norm > 0, norm, np.nan))
        axis.plot(history.column("step"), norm, **_style(history, bold))


def _rates(axis: Any, runs: Sequence[History]) -> None:
    for history, bold in _in_order(runs):
        if history.arm != "healed":
            continue
        schedule = history.column("learning_rate")
        rate = schedule * history.column("lr_scale")
        if bold:
            axis.plot(history.column("step"), schedule, color="#888888", lw=1.4)
            _name(axis, 0.80, schedule, "as scheduled", "#777777", above=True)
            _name(axis, 0.66, rate, "healed", _COLOURS["healed"], above=False)
        axis.plot(history.column("step"), rate, **_style(history, bold))


def _name(
    axis: Any, part: float, curve: np.ndarray, words: str, colour: str, *, above: bool
) -> None:
    """Writes a curve's name beside it, `part` of the way along."""
    index = int(part * len(curve))
    axis.annotate(
        words,
        (index, curve[index]),
        xytext=(0, 3 if above else -3),
        textcoords="offset points",
        va="bottom" if above else "top",
        fontsize=8.5,
        color=colour,
    )


def _deeds(axis: Any, runs: Sequence[History]) -> None:
    """One row of ticks per kind of healing."""
    healed = next((history for history in runs if history.arm == "healed"), None)
    rows = ("rollback", "LR cut", "skip", "clip")
    axis.set_yticks(range(len(rows)), rows)
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.grid(False)
    if healed is None:
        return
    steps = healed.steps
    at = (
        [back.step for back in healed.rollbacks],
        [one.step for one in steps if one.action & Action.CUT_LR],
        [one.step for one in steps if one.skip],
        [one.step for one in steps if one.grad_scale < 1 and not one.skip],
    )
    for row, where in enumerate(at):
        axis.vlines(where, row - 0.36, row + 0.36, color=_COLOURS["healed"], lw=1.6)


def _axes(grid: Any) -> None:
    from matplotlib.ticker import FuncFormatter

    for axis in grid.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(length=3, labelsize=9)
    for axis in grid[:3].flat:
        axis.grid(axis="y", color="#e6e6e6", lw=0.7)
        axis.set_axisbelow(True)
    top = grid[0, 0]
    top.set_yscale("function", functions=(_bend, _unbend))
    top.set_ylim(_LOW, _HIGH)
    top.set_yticks([2, 3, 4, 5, 6, 1e3, 1e6, 1e9, 1e12])
    top.yaxis.set_major_formatter(FuncFormatter(_tick))
    top.set_ylabel("training loss (nats per byte)\nlogarithmic above 6")
    middle = grid[1, 0]
    middle.set_yscale("log")
    middle.set_ylim(0.1, 3 * _INFINITE)
    middle.set_yticks([1, 1e5, 1e10, 1e15, _INFINITE], ["1", *_powers(5, 10, 15), "inf"])
    middle.minorticks_off()
    middle.set_ylabel("gradient norm\nbefore clipping")
    grid[2, 0].set_yscale("log")
    grid[2, 0].set_ylim(2e-5, 0.4)
    grid[2, 0].set_yticks([1e-4, 1e-3, 1e-2, 1e-1])
    grid[2, 0].minorticks_off()
    grid[2, 0].set_ylabel("learning rate\nin force")
    grid[3, 0].set_ylabel("healing")


def _in_order(runs: Sequence[History]) -> list[tuple[History, bool]]:
    """Healed last, so that it lies on top; the first seed of each is bold."""
    first = runs[0].seed
    order = list(_COLOURS)
    return [
        (history, history.seed == first)
        for history in sorted(runs, key=lambda one: (order.index(one.arm), one.seed != first))
    ]


def _style(history: History, bold: bool) -> dict[str, Any]:
    on_top = history.arm == "healed"
    return {
        "color": _COLOURS[history.arm],
        "lw": (1.9 if on_top else 1.4) if bold else 0.7,
        "alpha": 1.0 if bold else 0.4,
        "zorder": 5 if on_top else 3,
        "label": _LABELS[history.arm] if bold else None,
    }


def _bend(loss: np.ndarray) -> np.ndarray:
    """Linear up to the knee, then logarithmic."""
    loss = np.asarray(loss, float)
    above = _KNEE + _DECADE * np.log10(np.maximum(loss, _KNEE) / _KNEE)
    return np.where(loss <= _KNEE, loss, above)


def _unbend(height: np.ndarray) -> np.ndarray:
    height = np.asarray(height, float)
    above = _KNEE * 10.0 ** np.clip((height - _KNEE) / _DECADE, 0, 300)
    return np.where(height <= _KNEE, height, above)


def _powers(*exponents: int) -> list[str]:
    return [f"$10^{{{exponent}}}$" for exponent in exponents]


def _tick(value: float, _position: int | None = None) -> str:
    return f"{value:g}" if value < 100 else _powers(round(np.log10(value)))[0]
