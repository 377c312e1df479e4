"""Compares a run with healcore *on* against the same run with healcore *off*, over paired seeds.

The difference is the mean over seeds of on minus off, in a unit of the task: the mean of off, where
it is larger than the standard deviation of off over seeds. Where it is not (metrics around zero,
and metrics below zero, whose zero means nothing), the unit is 10 such standard deviations: 2 % are
then 0.2 standard deviations, which Cohen calls a small effect. A metric that is not finite is
infinitely bad; arms with as many of them are compared on the seeds where both are finite.

A faulty run is compared with the undamaged run of the arm that is off: the ratio of their metrics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.healbench.running import DONE, UNAVAILABLE, Result

OURS = ("attach_default", "healer", "healer_ask")
"""The arms of the promise. Their `off`, and that of all other arms, is `nothing`."""
OFF = "nothing"
NOISE, MARGIN = 1.0, 2.0
"""Percent: not worse by more than `NOISE` beyond two standard errors, nor by `MARGIN` at all."""
ROLLBACK_SHARE = 1 / 200
"""Of the healthy runs."""
CAP = 100.0
"""A ratio to the undamaged run counts as this at most; more, or no finite metric, is *lost*."""


@dataclass(frozen=True)
class Difference:
    """On minus off in percent of the task's unit; above zero is worse."""

    percent: float = math.nan
    """NaN: nothing to compare."""
    error: float = math.nan
    """Standard error of `percent`; NaN with one pair."""
    pairs: int = 0
    """Seeds that both have."""

    @property
    def worse(self) -> bool:
        """Beyond noise, or beyond the margin."""
        return self.percent > MARGIN or self.percent - 2 * self.error > NOISE

    @property
    def better(self) -> bool:
        """By more than `NOISE`, beyond two standard errors."""
        return self.percent == -math.inf or self.percent + 2 * self.error < -NOISE


def unit(off: np.ndarray) -> float:
    """What 100 % of a difference is, see above; 1 where all metrics are zero."""
    mean, spread = float(off.mean()), float(off.std(ddof=1)) if len(off) > 1 else 0.0
    return mean if mean > spread else 10 * spread or abs(mean) or 1.0


def difference(on: Mapping[int, float], off: Mapping[int, float]) -> Difference:
    """Compares two arms by their metrics, by seed."""
    seeds = sorted(on.keys() & off.keys())
    if not seeds:
        return Difference()
    ours = np.array([on[seed] for seed in seeds], float)
    theirs = np.array([off[seed] for seed in seeds], float)
    lost, theirs_lost = ~np.isfinite(ours), ~np.isfinite(theirs)
    if lost.sum() != theirs_lost.sum():
        return Difference(math.copysign(math.inf, lost.sum() - theirs_lost.sum()), 0.0, len(seeds))
    both = ~(lost | theirs_lost)
    if not both.any():
        return Difference(pairs=len(seeds))
    with np.errstate(over="ignore", invalid="ignore"):
        percents = 100 * (ours[both] - theirs[both]) / unit(theirs[both])
        error = percents.std(ddof=1) / math.sqrt(len(percents)) if len(percents) > 1 else math.nan
        return Difference(float(percents.mean()), float(error), len(percents))


@dataclass(frozen=True)
class Cell:
    """One arm on one task."""

    framework: str
    task: Any
    """The `Task`."""
    arm: str
    runs: tuple[Result, ...]
    metrics: dict[int, float]
    """Metrics by seed, NaN and infinite ones included."""
    against: Difference
    """From the arm that is off."""
    ratios: dict[int, float]
    """Metric over the undamaged one, of a faulty task, by seed; at most `CAP`."""
    same: dict[int, bool]
    """Whether metric and weights end bit for bit as those of the arm that is off, by seed."""

    @property
    def name(self) -> str:
        """The name of the task, with the framework where it is not torch."""
        return self.task.name + ("" if self.framework == "torch" else f" ({self.framework})")

    @property
    def mean(self) -> float:
        """Mean metric: infinite if a value is not finite, NaN without values."""
        values = list(self.metrics.values())
        finite = all(map(math.isfinite, values))
        return (math.fsum(values) / len(values) if finite else math.inf) if values else math.nan

    @property
    def ratio(self) -> float:
        """Geometric mean over seeds of the ratios; NaN without any."""
        return geometric_mean(self.ratios.values())

    @property
    def failed(self) -> tuple[Result, ...]:
        """Runs that raised, hung or crashed."""
        return tuple(run for run in self.runs if run.status not in (DONE, UNAVAILABLE))

    @property
    def available(self) -> bool:
        """Whether the arm can be run on this machine."""
        return any(run.status != UNAVAILABLE for run in self.runs)

    @property
    def rate_left_low(self) -> int:
        """Runs that ended at an LR multiplier below 1."""
        return sum(run.lr_scale < 1 for run in self.runs)

    @property
    def holds(self) -> bool:
        """Whether a healthy task is as it was without healcore."""
        return not (self.against.worse or self.failed or self.rate_left_low)

    def total(self, count: str) -> int:
        """The sum over runs of a count of `Result`."""
        return sum(getattr(run, count) for run in self.runs)


def geometric_mean(ratios: Iterable[float]) -> float:
    """NaN without values."""
    logs = [math.log(max(ratio, 1e-9)) for ratio in ratios]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan


def compare(results: Iterable[Result], tasks: Mapping[tuple[str, str], Any]) -> list[Cell]:
    """Compares every arm with the arm that is off.

    Args:
        results: of any tasks and arms, each job once.
        tasks: by framework and name.

    Returns:
        One cell for each task and arm with results, in the order of the tasks and of the results.
    """
    groups: dict[tuple[str, str], dict[str, list[Result]]] = {}
    for result in results:
        arms = groups.setdefault((result.framework, result.task), {})
        arms.setdefault(result.arm, []).append(result)
    cells = []
    for (framework, name), task in tasks.items():
        group = groups.get((framework, name), {})
        undamaged = groups.get((framework, task.reference), {}) if task.reference else {}
        for arm, runs in group.items():
            metrics = metrics_of(runs)
            cells.append(
                Cell(
                    framework,
                    task,
                    arm,
                    tuple(runs),
                    metrics,
                    difference(metrics, metrics_of(group.get(OFF, []))),
                    _ratios(metrics, metrics_of(undamaged.get(OFF, []))),
                    _same(runs, group.get(OFF, [])),
                )
            )
    return cells


def metrics_of(results: Iterable[Result]) -> dict[int, float]:
    """Metrics by seed of the runs that have one."""
    return {result.seed: result.value for result in results if result.status == DONE}


def _same(on: Iterable[Result], off: Iterable[Result]) -> dict[int, bool]:
    """Of the seeds that both have, with known weights."""
    plain = {run.seed: (run.weights, str(run.value)) for run in off if run.weights}
    both = [run for run in on if run.seed in plain and (run.weights or run.status != DONE)]
    return {run.seed: (run.weights, str(run.value)) == plain[run.seed] for run in both}


def _ratios(metrics: Mapping[int, float], undamaged: Mapping[int, float]) -> dict[int, float]:
    ratios = {s: metrics[s] / undamaged[s] for s in metrics if undamaged.get(s, 0) > 0}
    return {seed: ratio if ratio < CAP else CAP for seed, ratio in ratios.items()}


# -- the promise -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A part of the promise, and whether the results hold it."""

    text: str
    broken: tuple[str, ...]
    """The cells that break it, and how."""
    checked: int
    """How many results it was checked on; 0 if there are none."""

    @property
    def holds(self) -> bool:
        """No result breaks it."""
        return not self.broken


def rules(cells: Iterable[Cell]) -> list[Rule]:
    """The promise for a healthy run with healcore on, checked on the cells of `compare`."""
    cells = list(cells)
    ours = [cell for cell in cells if cell.arm in OURS]
    healthy = [cell for cell in ours if cell.task.kind == "healthy"]
    runs = sum(len(cell.runs) for cell in healthy)
    back = {(c.name, c.arm): sum(r.rollbacks > 0 for r in c.runs) for c in healthy}
    rolled_back = tuple(f"{task} {arm}: {n} runs" for (task, arm), n in back.items() if n)
    return [
        _rule("every run ends with a result", ours, lambda c: c.failed and c.failed[0].error),
        _rule(
            f"no healthy task is worse than the same run without healcore, by {NOISE:g} % beyond "
            f"two standard errors or by {MARGIN:g} %",
            healthy,
            lambda c: c.against.worse and shown(c.against),
        ),
        _rule(
            "no healthy run ends at a learning rate below the user's own",
            healthy,
            lambda c: c.rate_left_low and f"{c.rate_left_low} of {len(c.runs)} runs",
        ),
        Rule(
            "at most 1 of 200 healthy runs is rolled back",
            rolled_back if sum(back.values()) > ROLLBACK_SHARE * runs else (),
            runs,
        ),
        _rule("no healthy run that is rolled back ends worse", healthy, _harmful_rollback(cells)),
        _rule(
            "no healthy run is stopped",
            healthy,
            lambda c: next((run.stopped for run in c.runs if run.stopped), ""),
        ),
    ]


def _harmful_rollback(cells: Iterable[Cell]) -> Any:
    there = {(cell.name, cell.arm): cell for cell in cells}

    def wrong(cell: Cell) -> str:
        off = there.get((cell.name, OFF))
        seeds = [r.seed for r in cell.runs if r.rollbacks and r.status == DONE]
        if off is None or not off.metrics:
            return ""
        finite = np.array([value for value in off.metrics.values() if math.isfinite(value)])
        level = unit(finite) if len(finite) else 1.0
        worse = [
            seed
            for seed in seeds
            if seed in off.metrics
            and not 100 * (cell.metrics[seed] - off.metrics[seed]) / level <= MARGIN
        ]
        return f"seeds {worse}" if worse else ""

    return wrong


def _rule(text: str, cells: list[Cell], wrong: Any) -> Rule:
    """`wrong` describes how a cell breaks the rule; empty where it does not."""
    problems = ((cell, wrong(cell)) for cell in cells)
    broken = tuple(f"{cell.name} {cell.arm}: {what}" for cell, what in problems if what)
    return Rule(text, broken, len(cells))


def percent(value: float) -> str:
    """A percentage with its sign and only significant digits."""
    if math.isnan(value):
        return "?"
    if abs(value) >= 1000:
        return ("> +" if value > 0 else "< -") + "999 %"
    rounded = f"{value:+.0f}" if abs(value) >= 10 else f"{value:+.1f}"
    return f"{rounded} %".replace("-0.0 ", "0.0 ").replace("+0.0 ", "0.0 ")


def shown(against: Difference) -> str:
    """A difference with its standard error."""
    if not math.isfinite(against.error) or not math.isfinite(against.percent):
        return percent(against.percent)
    error = min(against.error, 999.0)
    error = f"{error:.0f}" if error >= 10 else f"{error:.1f}"
    return f"{percent(against.percent).removesuffix(' %')} ± {error} %"
