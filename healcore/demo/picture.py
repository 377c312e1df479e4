"""The picture: loss, gradient norm, learning rate and healing, one column per framework."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from healcore.demo import closeup, panels
from healcore.demo.history import History
from healcore.demo.scenario import Scenario

_TITLES = {"torch": "torch", "jax": "JAX / Flax"}
_KNEE = 6.0
"""Loss up to which the axis is linear; above it decades are this wide: a run that trains and one
that ends at 1e12 are both readable."""
_DECADE = 0.28
_LOW, _HIGH = 1.7, 1e14


def draw(histories: Sequence[History], scenario: Scenario, path: Path) -> None:
    """Draws all runs; the first seed in full, the others thin.

    The upper panels count batches, not steps: a run that goes back and leaves batches out takes
    later batches at earlier steps, and the faults of the data are to stay where they are.

    Args:
        histories: finished runs.
        scenario: the first seed's.
        path: the PNG to write.
    """
    # Here: the pictures of the demo are all that needs matplotlib. No window, whatever the backend.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    frameworks = list(dict.fromkeys(history.framework for history in histories))
    figure = Figure(figsize=(7.4 * len(frameworks) + 0.6, 12.2), layout="constrained")
    FigureCanvasAgg(figure)
    grid: Any = figure.subplots(
        5,
        len(frameworks),
        squeeze=False,
        sharey="row",
        height_ratios=(3.8, 1.7, 1.4, 1.2, 3.0),
    )
    for axes, framework in zip(grid.T, frameworks, strict=True):
        runs = [history for history in histories if history.framework == framework]
        _faults(axes[:4], scenario)
        panels.losses(axes[0], runs, scenario)
        panels.norms(axes[1], runs)
        panels.rates(axes[2], runs)
        panels.deeds(axes[3], runs)
        axes[0].set_title(_TITLES.get(framework, framework), fontsize=15, weight="bold", pad=34)
        for axis in axes[:4]:
            axis.set_xlim(0, scenario.steps - 1)
            axis.tick_params(labelbottom=axis is axes[3])
        axes[3].set_xlabel("batch")
        closeup.draw(axes[4], runs, scenario)
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


def _axes(grid: Any) -> None:
    from matplotlib.ticker import FuncFormatter

    for axis in grid.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(length=3, labelsize=9)
    for axis in (*grid[:3].flat, *grid[4]):
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
    middle.set_ylim(0.1, 3 * panels.INFINITE)
    middle.set_yticks([1, 1e5, 1e10, 1e15, panels.INFINITE], ["1", *_powers(5, 10, 15), "inf"])
    middle.minorticks_off()
    middle.set_ylabel("gradient norm\nbefore clipping")
    grid[2, 0].set_yscale("log")
    grid[2, 0].set_ylim(2e-5, 0.4)
    grid[2, 0].set_yticks([1e-4, 1e-3, 1e-2, 1e-1])
    grid[2, 0].minorticks_off()
    grid[2, 0].set_ylabel("learning rate\nin force")
    grid[3, 0].set_ylabel("healing")
    grid[4, 0].set_ylabel("training loss\n(nats per byte)")


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
