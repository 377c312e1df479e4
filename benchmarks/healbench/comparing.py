"""Compares arms: paired differences over seeds, and the verdicts on them.

Differences are taken seed by seed between two arms of one task, relative to the reference arm's
mean. The interval is Student's t with n - 1 degrees of freedom at 98 %, so that its lower end is
above zero exactly where the one-sided paired test finds *worse* at 1 %. A metric that is NaN or
infinite is infinitely bad: an arm with more of them than its reference is infinitely worse, with as
many it is compared on the seeds where both are finite.
"""

from __future__ import annotations

import enum
import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import special

from benchmarks.healbench.running import DONE, UNAVAILABLE, Result

LEVEL = 0.01
"""The level of the one-sided paired tests."""
MARGIN = 2.0
"""Percent: an arm that is worse by more is worse whatever the test finds."""
ROUNDING = 1e-6
"""Relative: differences that are smaller in every seed are none."""
DIVERGED_FROM = 100.0
"""Times the reference level."""
REFERENCES = {"healthy": ("nothing", "fixed_clip"), "sick": ("clip_skip_nan",)}
"""The arms whose better one the others are measured against."""
CURED = "fixed_clip"
"""The arm of a sick task's reference task whose result a perfect cure reaches."""


class Verdict(enum.StrEnum):
    """The result of an arm on a task; of several that hold, the first."""

    UNAVAILABLE = "unavailable"
    FAILED = "failed"
    """Some run raised, hung or crashed."""
    DIVERGED = "diverged"
    """Some run ended without a finite metric, or 100 times as bad as it should be."""
    STOPPED = "stopped"
    """The arm ended some run early."""
    REFERENCE = "reference"
    WORSE = "worse"
    BETTER = "better"
    SAME = "same"
    ALONE = "alone"
    """There is no reference to compare with."""


@dataclass(frozen=True)
class Difference:
    """An arm minus its reference in percent of the reference; above zero is worse."""

    percent: float = math.nan
    """NaN: nothing to compare."""
    low: float = math.nan
    high: float = math.nan
    p_worse: float = math.nan
    """P-value of the t-test against "not worse"; NaN with one pair or infinite differences."""
    p_better: float = math.nan
    pairs: int = 0
    """Seeds that both have."""

    @property
    def worse(self) -> bool:
        """Beyond noise, or beyond the margin."""
        return self.percent > MARGIN or (self.percent > 0 and self.p_worse < LEVEL)

    @property
    def better(self) -> bool:
        """Beyond noise."""
        return self.percent < 0 and (self.p_better < LEVEL or math.isinf(self.percent))


def difference(arm: Mapping[int, float], reference: Mapping[int, float]) -> Difference:
    """Compares the metrics of two arms, by seed."""
    seeds = sorted(arm.keys() & reference.keys())
    if not seeds:
        return Difference()
    ours = np.array([arm[seed] for seed in seeds], float)
    theirs = np.array([reference[seed] for seed in seeds], float)
    lost, theirs_lost = ~np.isfinite(ours), ~np.isfinite(theirs)
    if lost.sum() != theirs_lost.sum():
        far = math.copysign(math.inf, int(lost.sum()) - int(theirs_lost.sum()))
        return Difference(far, far, far, pairs=len(seeds))
    both = ~(lost | theirs_lost)
    if not both.any():
        return Difference(pairs=len(seeds))
    with np.errstate(over="ignore", invalid="ignore"):
        return _of_finite(ours[both] - theirs[both], abs(float(theirs[both].mean())))


def _of_finite(differences: np.ndarray, level: float) -> Difference:
    pairs, mean = len(differences), float(differences.mean())
    if np.all(np.abs(differences) <= ROUNDING * level):
        percent = 100 * mean / level if level else 0.0
        return Difference(percent, percent, percent, 1.0, 1.0, pairs)
    percent = 100 * mean / level if level else math.copysign(math.inf, mean)
    if pairs == 1:
        return Difference(percent, pairs=1)
    error = float(differences.std(ddof=1)) / math.sqrt(pairs)
    if error == 0:
        return Difference(percent, percent, percent, float(mean <= 0), float(mean >= 0), pairs)
    half = 100 * float(special.stdtrit(pairs - 1, 1 - LEVEL)) * error / (level or math.nan)
    p_better = float(special.stdtr(pairs - 1, mean / error))
    p_worse = float(special.stdtr(pairs - 1, -mean / error))
    return Difference(percent, percent - half, percent + half, p_worse, p_better, pairs)


@dataclass(frozen=True)
class Cell:
    """One arm on one task."""

    framework: str
    task: str
    kind: str
    arm: str
    policy: str
    """Fingerprint; empty where the arm has none."""
    verdict: Verdict
    worse: bool
    """Than the reference; also where some run failed."""
    metrics: dict[int, float]
    """Metrics by seed, NaN and infinite ones included."""
    mean: float
    """Infinite where one of them is not finite; NaN where there are none."""
    reference: str
    """The arm that it is compared with."""
    difference: Difference
    gap: float
    """Percent from what a perfect cure reaches, of a sick task; NaN: not known."""
    totals: dict[str, int]
    """Sums over seeds: runs, failed, stopped, and the counts of `Result`."""
    wall_ratio: float
    """Median over seeds of the training time over that of the arm `nothing`."""
    notes: tuple[str, ...] = field(default=())
    """Why runs stopped or failed, each once."""

    @property
    def name(self) -> str:
        """The name of the task, with the framework where it is not torch."""
        return self.task if self.framework == "torch" else f"{self.task} ({self.framework})"

    def per_10k(self, count: str) -> float:
        """A count per 10,000 iterations."""
        return 1e4 * self.totals[count] / self.totals["steps"] if self.totals["steps"] else 0.0


COUNTS = (
    "clips",
    "finite_skips",
    "nonfinite_skips",
    "lr_cuts",
    "rollbacks",
    "steps",
    "steps_lost",
)
Group = dict[str, list[Result]]


def compare(results: Iterable[Result], tasks: Mapping[tuple[str, str], Any]) -> list[Cell]:
    """Compares the arms on every task.

    Args:
        results: of any tasks and arms, each job once.
        tasks: by framework and name: what has a `kind` and a `reference`.

    Returns:
        One cell for each task and arm with results, in the order of the tasks and of the results.
    """
    groups: dict[tuple[str, str], Group] = {}
    for result in results:
        arms = groups.setdefault((result.framework, result.task), {})
        arms.setdefault(result.arm, []).append(result)
    cells = []
    for key, task in tasks.items():
        if key in groups:
            cured = groups.get((key[0], task.reference), {}) if task.reference else {}
            cells += _cells(key, task.kind, groups[key], metrics_of(cured.get(CURED, [])))
    return cells


def metrics_of(results: Iterable[Result]) -> dict[int, float]:
    """Metrics by seed of the runs that have one."""
    return {result.seed: result.value for result in results if result.status == DONE}


def mean_of(metrics: Mapping[int, float]) -> float:
    """The mean: infinite if a value is not finite, NaN without values."""
    if not metrics:
        return math.nan
    values = list(metrics.values())
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.inf


def reference_arm(metrics: Mapping[str, Mapping[int, float]], kind: str) -> str:
    """The reference arm with the lower mean over the seeds they share; empty: there is none."""
    there = [arm for arm in REFERENCES[kind] if metrics.get(arm)]
    if not there:
        return ""
    shared = set.intersection(*(set(metrics[arm]) for arm in there))
    if not shared:
        return there[0]
    return min(there, key=lambda arm: mean_of({seed: metrics[arm][seed] for seed in shared}))


def _cells(key: tuple[str, str], kind: str, group: Group, cured: Mapping[int, float]) -> list[Cell]:
    metrics = {arm: metrics_of(results) for arm, results in group.items()}
    reference = reference_arm(metrics, kind)
    levels = [mean_of(cured), mean_of(metrics.get(reference, {}))]
    level = min((each for each in levels if math.isfinite(each)), default=math.nan)
    cells = []
    for arm, results in group.items():
        against = difference(metrics[arm], metrics.get(reference, {}))
        verdict = _verdict(results, against, level, is_reference=arm == reference)
        cells.append(
            Cell(
                *key,
                kind=kind,
                arm=arm,
                policy=results[0].policy,
                verdict=verdict,
                worse=verdict == Verdict.FAILED or against.worse,
                metrics=metrics[arm],
                mean=mean_of(metrics[arm]),
                reference=reference,
                difference=against,
                gap=_gap(metrics[arm], cured),
                totals=_totals(results),
                wall_ratio=_wall_ratio(results, group.get("nothing", [])),
                notes=tuple(
                    dict.fromkeys(r.error or r.stopped for r in results if r.error or r.stopped)
                ),
            )
        )
    return cells


def _verdict(
    results: list[Result], against: Difference, level: float, *, is_reference: bool
) -> Verdict:
    statuses = {result.status for result in results}
    if statuses == {UNAVAILABLE}:
        return Verdict.UNAVAILABLE
    if statuses != {DONE}:
        return Verdict.FAILED
    if any(_diverged(result.value, level) for result in results):
        return Verdict.DIVERGED
    if any(result.stopped for result in results):
        return Verdict.STOPPED
    if is_reference:
        return Verdict.REFERENCE
    if against.worse:
        return Verdict.WORSE
    if against.better:
        return Verdict.BETTER
    return Verdict.ALONE if math.isnan(against.percent) else Verdict.SAME


def _diverged(metric: float, level: float) -> bool:
    return not math.isfinite(metric) or metric - level > (DIVERGED_FROM - 1) * abs(level)


def _gap(metrics: Mapping[int, float], cured: Mapping[int, float]) -> float:
    """Over the seeds that both have; a cure that is out of reach (NaN) has no gap."""
    seeds = metrics.keys() & cured.keys()
    ours = mean_of({seed: metrics[seed] for seed in seeds})
    best = mean_of({seed: cured[seed] for seed in seeds})
    return 100 * (ours - best) / abs(best) if best and math.isfinite(best) else math.nan


def _totals(results: list[Result]) -> dict[str, int]:
    totals = {name: sum(getattr(result, name) for result in results) for name in COUNTS}
    totals["runs"] = len(results)
    totals["failed"] = sum(result.status != DONE for result in results)
    totals["stopped"] = sum(bool(result.stopped) for result in results)
    return totals


def _wall_ratio(results: list[Result], plain: list[Result]) -> float:
    theirs = {result.seed: result.wall_s for result in plain if result.wall_s}
    ratios = [r.wall_s / theirs[r.seed] for r in results if r.status == DONE and r.seed in theirs]
    return float(np.median(ratios)) if ratios else math.nan


# -- what has to hold ------------------------------------------------------------------------------

WITH_CLIP = {
    "attach_default": "attach_clip",
    "healer": "healer_clip",
    "healer_ask": "healer_ask_clip",
}
"""healcore as it comes, and the same for a run that had a fixed clip before."""
HELD = (*WITH_CLIP, *WITH_CLIP.values())
"""The arms that the rules are about."""
BEFORE = dict.fromkeys(WITH_CLIP, "nothing") | dict.fromkeys(WITH_CLIP.values(), "fixed_clip")
"""The same run without healcore."""
ATTACHED = dict.fromkeys(WITH_CLIP, "attach_default")
ATTACHED |= dict.fromkeys(WITH_CLIP.values(), "attach_clip")
"""The same policy without a Healer."""
SKIPS_PER_10K = 1.0
WELL = 10.0
"""Percent from the cure: an arm that comes so near shows that another had no need to stop."""
HIGH_RATES = ("lr_6.7x", "lr_10x")
"""Tasks with a learning rate that is far too high."""
GAPS = {HIGH_RATES: 5.0, ("*bad_shard*",): 1.0}
"""How many percent from the cure the arms may end on tasks with such names."""


@dataclass(frozen=True)
class Rule:
    """A rule for healcore's arms, and whether the results hold it."""

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
    """The rules for healcore's arms from issue 9, checked on the cells of `compare`."""
    cells = list(cells)
    ours = [cell for cell in cells if cell.arm in HELD]
    healthy = [cell for cell in ours if cell.kind == "healthy"]
    sick = [cell for cell in ours if cell.kind == "sick"]
    there = {(cell.framework, cell.task, cell.arm): cell for cell in cells}

    def needless(cell: Cell) -> str:
        same = (c for c in cells if (c.framework, c.task) == (cell.framework, cell.task))
        well = [c.arm for c in same if _completes_well(c)] if cell.totals["stopped"] else []
        return f"stopped, {well[0]} completes" if well else ""

    def other(cell: Cell, arm: str) -> Cell | None:
        return there.get((cell.framework, cell.task, arm))

    def behind(arms: Mapping[str, str]) -> Callable[[Cell], str]:
        def wrong(cell: Cell) -> str:
            than = other(cell, arms[cell.arm])
            return _behind(difference(cell.metrics, than.metrics)) if than else ""

        return wrong

    def behind_reference(cell: Cell) -> str:
        return _behind(cell.difference)

    plain = [cell for cell in healthy if cell.arm in WITH_CLIP]
    better = [
        min((cell, other(cell, WITH_CLIP[cell.arm]) or cell), key=lambda each: each.mean)
        for cell in plain
    ]

    found = [
        _rule("every run ends with a result", ours, _no_result),
        _rule("no healthy task worse than the same run without healcore", healthy, behind(BEFORE)),
        _rule(
            "no healthy task worse than the better of nothing and fixed clip, with the better clip "
            "on both sides",
            better,
            behind_reference,
        ),
        _rule(
            "no healthy task worse than the better of nothing and fixed clip, as healcore comes",
            plain,
            behind_reference,
        ),
        _rule("no rollback, LR cut or stop on a healthy task", healthy, _drastic),
        Rule(
            f"at most {SKIPS_PER_10K:g} finite skip in 10,000 steps of the healthy tasks",
            tuple(_too_many_skips(healthy)),
            len(healthy),
        ),
        _rule("no sick task worse than clip + skip NaN", sick, behind_reference),
        _rule("no stop where another arm completes well", sick, needless),
    ]
    for names, limit in GAPS.items():

        def too_far(cell: Cell, limit: float = limit) -> str:
            return percent(cell.gap) if cell.gap > limit else ""

        text = f"{listed(names)}: within {limit:g} % of the run without the fault"
        measured = [c for c in sick if fits(c.task, names) and not math.isnan(c.gap)]
        found.append(_rule(text, measured, too_far))
    rates = [c for c in sick if fits(c.task, HIGH_RATES) and c.arm not in ATTACHED.values()]
    text = f"{listed(HIGH_RATES)}: the Healer not behind attach"
    return [*found, _rule(text, rates, behind(ATTACHED))]


def percent(value: float) -> str:
    """A percentage with its sign and only significant digits."""
    if math.isnan(value):
        return "?"
    if abs(value) >= 1000:
        return ("> +" if value > 0 else "< -") + "999 %"
    rounded = f"{value:+.0f}" if abs(value) >= 10 else f"{value:+.1f}"
    return f"{rounded} %".replace("-0.0 ", "0.0 ").replace("+0.0 ", "0.0 ")


def listed(names: Iterable[str]) -> str:
    """For Markdown."""
    return ", ".join(f"`{name}`" for name in names)


def _rule(text: str, cells: list[Cell], wrong: Callable[[Cell], str]) -> Rule:
    """`wrong` describes how a cell breaks the rule; empty where it does not."""
    problems = ((cell, wrong(cell)) for cell in cells)
    broken = tuple(f"{cell.name} {cell.arm}: {what}" for cell, what in problems if what)
    return Rule(text, broken, len(cells))


def _no_result(cell: Cell) -> str:
    lost = cell.totals["failed"]
    return f"{lost} of {cell.totals['runs']} {cell.verdict}: {cell.notes[0]}" if lost else ""


def _behind(against: Difference) -> str:
    if not against.worse:
        return ""
    test = "" if math.isnan(against.p_worse) else f"p = {against.p_worse:.2g}, "
    pairs = "1 pair" if against.pairs == 1 else f"{against.pairs} pairs"
    return f"{percent(against.percent)} ({test}{pairs})"


def _drastic(cell: Cell) -> str:
    counts = {name: cell.totals[name] for name in ("rollbacks", "lr_cuts", "stopped")}
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count)


def _too_many_skips(cells: list[Cell]) -> Iterator[str]:
    """Judges all tasks of an arm together: one task has too few steps."""
    for arm in dict.fromkeys(cell.arm for cell in cells):
        its = [cell for cell in cells if cell.arm == arm]
        steps = sum(cell.totals["steps"] for cell in its)
        skips = sum(cell.totals["finite_skips"] for cell in its)
        if skips * 1e4 > SKIPS_PER_10K * steps:
            most = max(its, key=lambda cell: cell.totals["finite_skips"])
            of_it = f"{most.totals['finite_skips']} of them on {most.name}"
            yield f"{arm}: {skips} in {steps:,} steps, {of_it}"


def _completes_well(cell: Cell) -> bool:
    if cell.totals["failed"] or cell.totals["stopped"] or cell.verdict == Verdict.DIVERGED:
        return False
    return not cell.worse if math.isnan(cell.gap) else cell.gap <= WELL


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name is one of these, or fits one of these patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
