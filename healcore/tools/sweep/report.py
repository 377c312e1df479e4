"""Formats a sweep as tables for a terminal, and as strict JSON."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePath
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from healcore.console import counted
from healcore.policy import fingerprint
from healcore.tools.sweep.choice import SplitScores, Validation
from healcore.tools.sweep.scores import LOWER, OBJECTIVES, PER, rates_of
from healcore.tools.sweep.search import Sweep

_EDGE = 0.02  # fraction of an axis
_LEGEND = "latency: median rows from onset to order of the found events"

SCHEMA = 1

_MAX_RANKING = 20  # settings


def render(found: Sweep) -> RenderableType:
    """Returns the output of the command."""
    verdict = found.verdict
    parts: list[RenderableType] = [Text(_headline(found)), Text(objective(found), "dim")]
    parts += [Text(""), _settings(found), Text(""), _scores(found), Text(_LEGEND, "dim")]
    checked = verdict.validation
    if checked is not None:
        parts += [
            Text(""),
            _validation(found, checked),
            Text(_held_out(found, checked), "dim"),
        ]
    parts += [Text(""), Text(verdict.reason, "bold"), *map(Text, notes(found))]
    return Group(*parts)


def notes(found: Sweep) -> list[str]:
    """Returns warnings about the search range, the labels and the runs."""
    lines = []
    for i, axis in enumerate(found.variants.axes if found.verdict.take else ()):
        units = found.variants.units[found.verdict.choice.plateau, i]
        ends = units.min() < _EDGE, units.max() > 1 - _EDGE
        if ends[0] != ends[1]:
            end, number = ("lower", axis.low) if ends[0] else ("upper", axis.high)
            lines.append(
                f"the plateau reaches the {end} end of {axis.key} ({number:g}): widen its range"
            )
    unlabelled = found.runs - found.labelled
    if unlabelled:
        lines.append(
            f"{unlabelled} of {counted(found.runs, 'run')} without labels: events come from a "
            "rule in hindsight (docs/replay.md), which may be wrong"
        )
    if run := found.splits.only_eventful:
        lines.append(
            f"only one family has events (with {PurePath(run).name}): its runs "
            "are held out separately, so one recipe is on both sides"
        )
    if not found.verdict.rates.events:
        lines.append("the runs have no events: only false recoveries and skips were compared")
    if found.variants.dropped:
        lines.append(f"excluded: {counted(found.variants.dropped, 'setting')}, not a valid policy")
    resumed = len(found.series) > found.runs
    for problem, count in Counter(each.problem for each in found.excluded).items():
        lines.append(f"excluded: {counted(count, 'attempt' if resumed else 'run')} ({problem})")
    return lines


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
    runs, attempts = counted(found.runs, "run"), len(found.series)
    return runs if attempts == found.runs else f"{runs} ({counted(attempts, 'attempt')})"


def objective(found: Sweep) -> str:
    """Describes the objective."""
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
    # With these objectives, the score is the negative of another column.
    has_score = found.plan.objective not in LOWER
    names = (f"within {found.plan.costs.within}", "found", "latency (rows)")
    for name in (*(("score",) if has_score else ()), *names):
        table.add_column(name, justify="right")
    for name in ("false", "lost"):
        table.add_column(f"{name} / {PER:,}", justify="right")
    choice = found.verdict.choice
    for name, i in (("base", 0), ("plateau's middle", choice.index), ("single best", choice.best)):
        rates = rates_of(found.verdict.rates, found.counts, i)
        table.add_row(
            name,
            *((f"{found.verdict.scores[i]:.4f}",) if has_score else ()),
            _or_dash(rates["recall"], ".1%"),
            _or_dash(rates["found"], ".1%"),
            _or_dash(rates["latency_rows"], "g"),
            _or_dash(rates["false"], ".3f"),
            _or_dash(rates["lost"], ".1f"),
        )
    return table


def _validation(found: Sweep, checked: Validation) -> Table:
    """Builds a table of training and held-out scores, in the unit of the objective."""
    ranked = found.plan.objective
    lower = ranked in LOWER
    quantity = f"{ranked} / {PER:,}" if lower else "score"
    splits = f"{counted(checked.splits, 'split')} by {found.splits.by}"
    table = Table(f"{quantity}, mean of {splits}", box=None, pad_edge=False)
    for name in ("train", "held out", "gap"):
        table.add_column(name, justify="right")
    rows: tuple[tuple[str, SplitScores], ...] = (
        ("base", checked.base),
        ("plateau's middle, chosen on train", checked.chosen),
        ("single best on train", checked.best),
    )
    # Scores without an event say nothing, except of false recoveries.
    empty = ranked != "false" and not checked.ever_held_out
    sign, digits = (-1, 1 if ranked == "lost" else 3) if lower else (1, 4)
    for name, each in rows:
        # `+ 0.0` removes negative zeros. In every unit, a positive gap is worse when held out.
        train, held_out = (round(sign * x, digits) + 0.0 for x in (each.train, each.held_out))
        gap = f"{round(each.gap, digits) + 0.0:+.{digits}f}"
        unseen = ("-", "-") if empty else (f"{held_out:.{digits}f}", gap)
        table.add_row(name, f"{train:.{digits}f}", *unseen)
    return table


def _held_out(found: Sweep, checked: Validation) -> str:
    """Describes the number of held-out events, and the gap."""
    low, high, total = min(checked.events), max(checked.events), found.verdict.rates.events
    number = f"{low}" if low == high else f"{low} to {high}"
    return (
        f"events held out: {number} of {total} in each split, {checked.ever_held_out} of {total} "
        "in any split. gap: how much worse the held-out runs score"
    )


def _or_dash(rate: float | None, form: str) -> str:
    return "-" if rate is None else format(rate, form)


def to_json(found: Sweep) -> dict[str, Any]:
    """Returns the sweep as JSON-safe data, with null for non-finite numbers."""
    verdict, choice = found.verdict, found.verdict.choice
    ranked = sorted(range(len(verdict.scores)), key=lambda i: -verdict.scores[i])[:_MAX_RANKING]
    checked = verdict.validation
    return {
        "schema": SCHEMA,
        "kind": "sweep",
        "policy": found.base.name,
        "fingerprint": fingerprint(found.base),
        "objective": found.plan.objective,
        "objective_words": objective(found),
        "within": found.plan.costs.within,
        "price": found.plan.price,
        "recovery_steps": found.plan.costs.recovery,
        "runs": found.runs,
        "attempts": len(found.series),
        "labelled_runs": found.labelled,
        "rows": verdict.rates.rows,
        "events": verdict.rates.events,
        "variants": len(found.variants.values),
        "backend": found.backend,
        "policy_steps": found.policy_steps,
        "seconds": round(found.seconds, 3),
        "axes": [
            {"key": a.key, "low": a.low, "high": a.high, "log": a.log, "values": list(a.listed)}
            for a in found.variants.axes
        ],
        "take": "new" if verdict.take else "base",
        "reason": verdict.reason,
        "taken_fingerprint": fingerprint(found.policy),
        "base": _setting(found, 0),
        "chosen": _setting(found, choice.index),
        "best": _setting(found, choice.best),
        "ranking": [_setting(found, i) for i in ranked],
        "plateau_size": int(choice.plateau.sum()),
        "held_out": None
        if checked is None
        else {
            "splits": checked.splits,
            "by": found.splits.by,
            "families": found.splits.families,
            "share": found.plan.holdout,
            "worse_than_base": checked.worse,
            "events": list(checked.events),
            "events_in_some_split": checked.ever_held_out,
            **{
                name: {**each._asdict(), "gap": each.gap}
                for name, each in zip(("base", "chosen", "best"), checked[:3], strict=True)
            },
        },
        "notes": notes(found),
        "left_out": [each._asdict() for each in found.excluded],
        "failed": [each._asdict() for each in found.failed],
    }


def _setting(found: Sweep, i: int) -> dict[str, Any]:
    values = {
        axis.key: round(value) if axis.whole else value
        for axis, value in zip(found.variants.axes, found.variants.values[i].tolist(), strict=True)
    }
    return {
        "values": values,
        "score": float(found.verdict.scores[i]),
        "smooth": float(found.verdict.choice.smooth[i]),
        **rates_of(found.verdict.rates, found.counts, i),
    }
