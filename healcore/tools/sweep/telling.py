"""A sweep in words and tables."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePath

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from healcore.tools.sweep.counting import counted
from healcore.tools.sweep.objective import LOWER, OBJECTIVES, PER, rates_of
from healcore.tools.sweep.outcome import Standing, Validation
from healcore.tools.sweep.search import Sweep

_EDGE = 0.02  # of an axis
_LEGEND = "latency: rows from onset to order, median of the events found"


def shown(found: Sweep) -> RenderableType:
    """What the command prints."""
    verdict = found.verdict
    parts: list[RenderableType] = [Text(_headline(found)), Text(objective(found), "dim")]
    parts += [Text(""), _settings(found), Text(""), _scores(found), Text(_LEGEND, "dim")]
    checked = verdict.validation
    if checked is not None:
        parts += [Text(""), _validation(found, checked), Text(_held(found, checked), "dim")]
    parts += [Text(""), Text(verdict.reason, "bold"), *map(Text, notes(found))]
    return Group(*parts)


def notes(found: Sweep) -> list[str]:
    """What should be known beside the tables."""
    told = []
    for i, axis in enumerate(found.variants.axes if found.verdict.take else ()):
        units = found.variants.units[found.verdict.choice.plateau, i]
        ends = units.min() < _EDGE, units.max() > 1 - _EDGE
        if ends[0] != ends[1]:
            end, number = ("lower", axis.low) if ends[0] else ("upper", axis.high)
            told.append(
                f"the plateau reaches the {end} end of {axis.key} ({number:g}): widen its range"
            )
    unlabelled = found.runs - found.labelled
    if unlabelled:
        told.append(
            f"{unlabelled} of {counted(found.runs, 'run')} without labels: events are seen in "
            "hindsight there (docs/sweep.md), which is a rule and no truth"
        )
    if found.splits.alone:
        told.append(
            f"only one family of runs has events, that of {PurePath(found.splits.alone).name}: its "
            "runs are held out singly, so that one recipe is on both sides"
        )
    if not found.verdict.rates.events:
        told.append("there was no event to find: only false recoveries and skips could be compared")
    if found.variants.dropped:
        told.append(
            f"left out: {counted(found.variants.dropped, 'setting')} drawn, no valid policy"
        )
    resumed = len(found.series) > found.runs
    for problem, count in Counter(each.problem for each in found.left_out).items():
        told.append(f"left out: {counted(count, 'attempt' if resumed else 'run')} ({problem})")
    return told


def _headline(found: Sweep) -> str:
    rates = found.verdict.rates
    speed = found.policy_steps / max(found.seconds, 1e-9) / 1e6
    return (
        f"{counted(len(found.variants.values), 'setting')} of policy {found.base.name} on "
        f"{_runs(found)}: {counted(rates.rows, 'row')}, {counted(rates.events, 'event')}. "
        f"{found.policy_steps / 1e6:,.1f} million policy-steps in {found.seconds:.1f} s "
        f"({speed:,.1f} million a second, {found.backend})"
    )


def _runs(found: Sweep) -> str:
    """Runs, and attempts where some run was resumed."""
    runs, attempts = counted(found.runs, "run"), len(found.series)
    return runs if attempts == found.runs else f"{runs} ({counted(attempts, 'attempt')})"


def objective(found: Sweep) -> str:
    """What the settings are ranked by."""
    plan = found.plan
    words = OBJECTIVES[plan.objective].replace("N steps", f"{plan.costs.within} steps")
    return f"ranked by {plan.objective}: {words.replace('`price`', f'{plan.price:g}')}"


def _settings(found: Sweep) -> Table:
    table = Table("key", box=None, pad_edge=False)
    for name in ("base", "plateau's middle", "plateau", "single best", "range"):
        table.add_column(name, justify="right")
    choice, values = found.verdict.choice, found.variants.values
    for i, axis in enumerate(found.variants.axes):
        members = values[choice.plateau, i]
        table.add_row(
            axis.key,
            *(f"{values[k, i]:.6g}" for k in (0, choice.index)),
            f"{members.min():.4g} to {members.max():.4g}",
            f"{values[choice.best, i]:.6g}",
            f"{axis.low:.4g} to {axis.high:.4g}{' (log)' if axis.log else ''}",
        )
    return table


def _scores(found: Sweep) -> Table:
    table = Table("on all runs", box=None, pad_edge=False)
    # A score that is only the negative of another column would be read twice.
    scored = found.plan.objective not in LOWER
    names = (f"within {found.plan.costs.within}", "found", "latency (rows)")
    for name in (*(("score",) if scored else ()), *names):
        table.add_column(name, justify="right")
    for name in ("false", "lost"):
        table.add_column(f"{name} / {PER:,}", justify="right")
    choice = found.verdict.choice
    for name, i in (("base", 0), ("plateau's middle", choice.index), ("single best", choice.best)):
        rates = rates_of(found.verdict.rates, found.tallies, i)
        table.add_row(
            name,
            *((f"{found.verdict.scores[i]:.4f}",) if scored else ()),
            _or_none(rates["recall"], ".1%"),
            _or_none(rates["found"], ".1%"),
            _or_none(rates["latency_rows"], "g"),
            _or_none(rates["false"], ".3f"),
            _or_none(rates["lost"], ".1f"),
        )
    return table


def _validation(found: Sweep, checked: Validation) -> Table:
    """Train against held out, in the unit of the objective."""
    ranked = found.plan.objective
    lower = ranked in LOWER
    what = f"{ranked} / {PER:,}" if lower else "score"
    splits = f"{counted(checked.splits, 'split')} by {found.splits.by}"
    table = Table(f"{what}, mean of {splits}", box=None, pad_edge=False)
    for name in ("train", "held out", "gap"):
        table.add_column(name, justify="right")
    rows: tuple[tuple[str, Standing], ...] = (
        ("base", checked.base),
        ("plateau's middle, chosen anew on train", checked.chosen),
        ("single best on train", checked.best),
    )
    sign, digits = (-1, 1 if ranked == "lost" else 3) if lower else (1, 4)
    for name, each in rows:
        # `+ 0.0`: no negative zeros. The gap is what held out is worse by, in every unit.
        train, held_out = (round(sign * x, digits) + 0.0 for x in (each.train, each.held_out))
        gap = f"{round(each.gap, digits) + 0.0:+.{digits}f}"
        table.add_row(name, f"{train:.{digits}f}", f"{held_out:.{digits}f}", gap)
    return table


def _held(found: Sweep, checked: Validation) -> str:
    """How many events the splits held out, and what the gap is."""
    few, many, all_ = min(checked.events), max(checked.events), found.verdict.rates.events
    each = f"{few}" if few == many else f"{few} to {many}"
    return (
        f"events held out: {each} of {all_} in each split, {checked.ever} of {all_} in some split. "
        "gap: by how much it is worse where held out"
    )


def _or_none(rate: float | None, form: str) -> str:
    return "-" if rate is None else format(rate, form)
