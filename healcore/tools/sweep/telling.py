"""A sweep in words and tables, and as strict JSON."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from healcore.policy import fingerprint
from healcore.tools.sweep.objective import OBJECTIVES, PER, Rates
from healcore.tools.sweep.outcome import Standing
from healcore.tools.sweep.search import Sweep

SCHEMA = 1

_SHOWN = 20  # settings of the ranking in JSON
_EDGE = 0.02  # of an axis


def shown(found: Sweep) -> RenderableType:
    """What the command prints."""
    verdict = found.verdict
    parts: list[RenderableType] = [Text(_headline(found)), Text(_objective(found), "dim")]
    parts += [Text(""), _settings(found), Text(""), _scores(found)]
    if verdict.validation is not None:
        parts += [Text(""), _validation(found)]
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
    labels, runs = found.labelled, len(found.series)
    if labels < runs:
        told.append(
            f"{runs - labels} of {runs} runs have no labels: their events are seen in hindsight "
            "(docs/sweep.md), which is a rule and no truth"
        )
    if not found.verdict.rates.events:
        told.append("there was no event to find: only false recoveries and skips could be compared")
    if found.variants.dropped:
        told.append(f"{found.variants.dropped} settings drawn were no valid policy, and left out")
    for problem, count in Counter(each.problem for each in found.left_out).items():
        told.append(f"left out: {count} run{'s' if count > 1 else ''} ({problem})")
    return told


def to_json(found: Sweep) -> dict[str, Any]:
    """The sweep as JSON-safe data: every number finite, or one of the words nan, inf, -inf."""
    verdict, choice = found.verdict, found.verdict.choice
    ranked = sorted(range(len(verdict.scores)), key=lambda i: -verdict.scores[i])[:_SHOWN]
    checked = verdict.validation
    return {
        "schema": SCHEMA,
        "kind": "sweep",
        "policy": found.base.name,
        "fingerprint": fingerprint(found.base),
        "objective": found.plan.objective,
        "objective_words": _objective(found),
        "within": found.plan.costs.within,
        "price": found.plan.price,
        "recovery_steps": found.plan.costs.recovery,
        "runs": len(found.series),
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
            **{
                name: {k: _number(v) for k, v in (*each._asdict().items(), ("gap", each.gap))}
                for name, each in zip(
                    ("base", "chosen", "best"),
                    (checked.base, checked.chosen, checked.best),
                    strict=True,
                )
            },
        },
        "notes": notes(found),
        "left_out": [each._asdict() for each in found.left_out],
        "failed": [each._asdict() for each in found.failed],
    }


def _headline(found: Sweep) -> str:
    rates = found.verdict.rates
    speed = found.policy_steps / max(found.seconds, 1e-9) / 1e6
    return (
        f"{len(found.variants.values):,} settings of policy {found.base.name} on "
        f"{len(found.series)} runs: {rates.rows:,} rows, {rates.events} events. "
        f"{found.policy_steps / 1e6:,.1f} million policy-steps in {found.seconds:.1f} s "
        f"({speed:,.1f} million a second, {found.backend})"
    )


def _objective(found: Sweep) -> str:
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
    within = found.plan.costs.within
    for name in ("score", f"within {within}", "found", "latency"):
        table.add_column(name, justify="right")
    for name in ("false", "lost"):
        table.add_column(f"{name} / {PER:,}", justify="right")
    choice = found.verdict.choice
    for name, i in (("base", 0), ("plateau's middle", choice.index), ("single best", choice.best)):
        rates = _at(found.verdict.rates, i)
        table.add_row(
            name,
            f"{found.verdict.scores[i]:.4f}",
            f"{rates['recall']:.1%}",
            f"{rates['found']:.1%}",
            "-" if math.isnan(rates["latency"]) else f"{rates['latency']:.1f}",
            f"{rates['false']:.3f}",
            f"{rates['lost']:.1f}",
        )
    return table


def _validation(found: Sweep) -> Table:
    checked = found.verdict.validation
    assert checked is not None
    table = Table(
        f"score, mean of {checked.splits} splits by {found.splits.by}", box=None, pad_edge=False
    )
    for name in ("train", "held out", "gap"):
        table.add_column(name, justify="right")
    rows: tuple[tuple[str, Standing], ...] = (
        ("base", checked.base),
        ("plateau's middle, chosen anew on train", checked.chosen),
        ("single best on train", checked.best),
    )
    for name, each in rows:
        table.add_row(name, f"{each.train:.4f}", f"{each.held_out:.4f}", f"{each.gap:+.4f}")
    return table


def _setting(found: Sweep, i: int) -> dict[str, Any]:
    values = {
        axis.key: round(v) if axis.whole else v
        for axis, v in zip(found.variants.axes, found.variants.values[i].tolist(), strict=True)
    }
    scores = {"score": found.verdict.scores[i], "smooth": found.verdict.choice.smooth[i]}
    rates = {**scores, **_at(found.verdict.rates, i)}
    return {"values": values} | {name: _number(float(v)) for name, v in rates.items()}


def _at(rates: Rates, i: int) -> dict[str, float]:
    """One setting's rates."""
    return {name: float(getattr(rates, name)[i]) for name in Rates._fields[2:]}


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
