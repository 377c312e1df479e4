"""The results as JSON, as Markdown for the docs, and as lines for a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.healbench.comparing import HELD, LEVEL, MARGIN, Cell, Rule, Verdict, percent
from benchmarks.side_by_side import machine

BEGIN = "<!-- healbench: begin (written by python -m benchmarks.healbench) -->"
END = "<!-- healbench: end -->"
LEGEND = (
    f"A cell is the mean held-out metric over the seeds (lower is better), and in brackets the "
    f"paired difference from the reference arm with its {100 - 200 * LEVEL:g} % interval. "
    f"▲ worse: beyond noise (one-sided paired t-test at {100 * LEVEL:g} %) or by more than "
    f"{MARGIN:g} %. ▽ better: beyond noise. *Diverged*: not finite, or 100 times as bad."
)
Tasks = Mapping[tuple[str, str], Any]


# -- JSON ------------------------------------------------------------------------------------------


def as_data(cells: Iterable[Cell], rules: Iterable[Rule]) -> dict[str, Any]:
    """Strict JSON: what is not finite is a string."""
    return {
        "machine": machine(),
        "rules": [
            {"rule": r.text, "checked": r.checked, "holds": r.holds, "broken": list(r.broken)}
            for r in rules
        ],
        "cells": [_data(cell) for cell in cells],
    }


def _data(cell: Cell) -> dict[str, Any]:
    against = cell.difference
    return {
        "framework": cell.framework,
        "task": cell.task,
        "kind": cell.kind,
        "arm": cell.arm,
        "policy": cell.policy,
        "verdict": str(cell.verdict),
        "worse": cell.worse,
        "mean": _strict(cell.mean),
        "metrics": {str(seed): _strict(value) for seed, value in sorted(cell.metrics.items())},
        "reference": cell.reference,
        "difference_percent": _strict(against.percent),
        "interval_percent": [_strict(against.low), _strict(against.high)],
        "p_worse": _strict(against.p_worse),
        "pairs": against.pairs,
        "gap_percent": _strict(cell.gap),
        **cell.totals,
        "wall_ratio": _strict(cell.wall_ratio),
        "notes": list(cell.notes),
    }


def _strict(value: float) -> float | str:
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)


# -- Markdown --------------------------------------------------------------------------------------


def as_markdown(cells: Sequence[Cell], rules: Sequence[Rule], tasks: Tasks, figure: str) -> str:
    """The generated part of docs/healbench.md.

    Args:
        cells: of `compare`.
        rules: of `comparing.rules`.
        tasks: by framework and name, in the order of the tables.
        figure: address of the picture, from the page.
    """
    parts = [f"{_extent(cells)} {machine()}.", "### What has to hold\n\n" + _of_rules(rules)]
    parts += [by_chance(cells)]
    parts += ["### Arms\n\n" + markdown(_overview(cells))]
    parts += [f"![Differences of the main arms from their references, by task]({figure})", LEGEND]
    for kind, about in KINDS.items():
        some = [cell for cell in cells if cell.kind == kind]
        if some:
            parts.append(f"### {kind.capitalize()} tasks\n\n{about}")
            parts.append(markdown(_grid(some, _metric_text, first="task (metric)", tasks=tasks)))
    watched = [cell for cell in cells if cell.policy]
    if watched:
        parts.append("### What healcore did\n\n" + INTERVENTIONS)
        parts.append(markdown(_grid(watched, interventions)))
    parts.append("### The tasks\n\n" + _abouts(cells, tasks))
    notes = [f"- {cell.name}, {cell.arm}: {note}" for cell in cells for note in cell.notes[:1]]
    if notes:
        parts.append("### Why runs stopped or failed\n\n" + "\n".join(notes))
    return "\n\n".join(parts) + "\n"


KINDS = {
    "healthy": "Nothing is wrong with these runs. The reference is the better of `nothing` and "
    "`fixed_clip`.",
    "sick": "The reference is `clip_skip_nan`. *Gap*: from what the same run without the fault "
    "reaches under `fixed_clip`.",
}
INTERVENTIONS = (
    "Skips of finite and of non-finite steps per 10,000 steps, then the number of LR cuts, "
    "rollbacks and runs stopped, over all seeds; `-`: none of these."
)


def _extent(cells: Sequence[Cell]) -> str:
    tasks = {kind: len({c.name for c in cells if c.kind == kind}) for kind in KINDS}
    runs = sum(cell.totals["runs"] for cell in cells)
    seeds = sorted({cell.totals["runs"] for cell in cells})
    several = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return (
        f"{tasks['healthy']} healthy and {tasks['sick']} sick tasks, "
        f"{len({cell.arm for cell in cells})} arms, {several} seeds: {runs:,} runs."
    )


def _of_rules(rules: Iterable[Rule]) -> str:
    lines = []
    for rule in rules:
        state = (
            "not checked" if not rule.checked else "holds" if rule.holds else "**does not hold**"
        )
        lines.append(f"- {rule.text}: {state}")
        lines += [f"    - {where}" for where in rule.broken]
    return "\n".join(lines)


def by_chance(cells: Iterable[Cell]) -> str:
    """How many of the arms that the rules are about would be called worse if none were."""
    tests = sum(0 < cell.difference.p_worse < 1 for cell in cells if cell.arm in HELD)
    return (
        f"The rules look at {tests} paired tests that are no ties, at {100 * LEVEL:g} % each: "
        f"about {tests * LEVEL:.1f} of them say worse by chance alone."
    )


def _overview(cells: Sequence[Cell]) -> list[list[str]]:
    """One row for each arm."""
    heading = ["arm"]
    heading += [f"{kind}: {what}" for kind in KINDS for what in ("worse", "better", "no result")]
    heading += ["clips per 10k", "finite skips per 10k", "LR cuts", "rollbacks", "stopped"]
    heading += ["steps lost", "wall time"]
    rows = [heading]
    for arm in dict.fromkeys(cell.arm for cell in cells):
        its = [cell for cell in cells if cell.arm == arm]
        row = [f"`{arm}`"]
        for kind in KINDS:
            some = [cell for cell in its if cell.kind == kind]
            lost = sum(cell.verdict in (Verdict.FAILED, Verdict.UNAVAILABLE) for cell in some)
            worse = sum(cell.worse for cell in some) - sum(
                c.verdict == Verdict.FAILED for c in some
            )
            better = sum(cell.difference.better for cell in some)
            row += [f"{worse} of {len(some) - lost}", str(better), str(lost)]
        total = {name: sum(cell.totals[name] for cell in its) for name in its[0].totals}
        steps = total["steps"] or 1
        row += [_rate(1e4 * total[name] / steps) for name in ("clips", "finite_skips")]
        row += [f"{total[name]:,}" for name in ("lr_cuts", "rollbacks", "stopped", "steps_lost")]
        ratios = sorted(c.wall_ratio for c in its if math.isfinite(c.wall_ratio))
        rows.append([*row, f"× {ratios[len(ratios) // 2]:.2f}" if ratios else "-"])
    return rows


def _grid(
    cells: Sequence[Cell],
    text: Callable[[Cell], str],
    first: str = "task",
    tasks: Tasks | None = None,
) -> list[list[str]]:
    """Tasks as rows, arms as columns; empty where there is no result."""
    arms = list(dict.fromkeys(cell.arm for cell in cells))
    rows = [[first, *(f"`{arm}`" for arm in arms)]]
    for key in dict.fromkeys((cell.framework, cell.task) for cell in cells):
        its = {cell.arm: cell for cell in cells if (cell.framework, cell.task) == key}
        name = next(iter(its.values())).name
        label = f"{name} ({tasks[key].metric})" if tasks else name
        rows.append([label, *(text(its[arm]) if arm in its else "" for arm in arms)])
    return rows


def _metric_text(cell: Cell) -> str:
    lost, stopped, runs = cell.totals["failed"], cell.totals["stopped"], cell.totals["runs"]
    if cell.verdict == Verdict.UNAVAILABLE:
        return "unavailable"
    parts = (
        [f"{cell.mean:.3g}" if math.isfinite(cell.mean) else "not finite"] if cell.metrics else []
    )
    against = cell.difference
    if cell.arm == cell.reference:
        parts.append("(ref)")
    elif not math.isnan(against.percent):
        half = (against.high - against.low) / 2
        spread = f" ± {_plain(half)}" if math.isfinite(half) else ""
        parts.append(f"({percent(against.percent).removesuffix(' %')}{spread} %)")
        mark = "▲" if against.worse else "▽" if against.better else ""
        parts += [mark] if mark else []
    if not math.isnan(cell.gap):
        parts.append(f"gap {percent(cell.gap)}")
    if lost:
        parts.append(f"{lost}/{runs} failed")
    if cell.verdict == Verdict.DIVERGED:
        parts.append("diverged")
    if stopped:
        parts.append(f"{stopped}/{runs} stopped")
    text = " ".join(parts)
    return f"**{text}**" if cell.worse else text


def _plain(value: float) -> str:
    return ">999" if value >= 1000 else f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def interventions(cell: Cell) -> str:
    """Skips per 10,000 steps, cuts, rollbacks and stops; only those there are."""
    total, parts = cell.totals, []
    if total["finite_skips"] or total["nonfinite_skips"]:
        rates = [cell.per_10k(name) for name in ("finite_skips", "nonfinite_skips")]
        parts.append("skips {} + {}".format(*map(_rate, rates)))
    for name, shown in (("lr_cuts", "cuts"), ("rollbacks", "rollbacks"), ("stopped", "stops")):
        if total[name]:
            parts.append(f"{shown} {total[name]}")
    if total["failed"]:
        parts.append(f"{total['failed']}/{total['runs']} failed")
    return ", ".join(parts) or "-"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _abouts(cells: Iterable[Cell], tasks: Tasks) -> str:
    keys = dict.fromkeys((cell.framework, cell.task) for cell in cells)
    names = {(cell.framework, cell.task): cell.name for cell in cells}
    return "\n".join(f"- `{names[key]}` ({tasks[key].kind}): {tasks[key].about}" for key in keys)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its heading."""
    lines = ["| " + " | ".join(each.replace("|", "\\|") for each in row) + " |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join(lines)


# -- where it goes ---------------------------------------------------------------------------------


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """One cell on a line, so that a change of one shows as one."""
    cells = ",\n".join("  " + json.dumps(cell, allow_nan=False) for cell in data["cells"])
    rest = {key: value for key, value in data.items() if key != "cells"}
    head = json.dumps(rest, indent=1, allow_nan=False).removesuffix("\n}")
    path.write_text(f'{head},\n "cells": [\n{cells}\n ]\n}}\n')


def write_between(path: Path, text: str) -> None:
    """Replaces what is between the two marks of a page; one without them gets them at its end.

    Raises:
        ValueError: only one of the marks is there, or they are the wrong way round.
    """
    page = path.read_text() if path.exists() else "# healbench\n"
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin and END not in page:
        before, after = page.rstrip("\n") + "\n\n", "\n"
    elif not end:
        raise ValueError(f"{path} needs both marks, in this order: {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")


def as_text(cells: Sequence[Cell], rules: Iterable[Rule]) -> str:
    """For a terminal: what each arm came to, then the rules."""
    rows = _overview(cells)
    keys = [f"({number}) {title}" for number, title in enumerate(rows[0][1:], start=1)]
    short = [["", *(f"({k})" for k in range(1, len(rows[0])))], *rows[1:]]
    widths = [max(len(row[k]) for row in short) for k in range(len(short[0]))]
    lines = ["  ".join(keys), ""]
    for row in short:
        cells_of_row = [row[0].strip("`").ljust(widths[0])]
        cells_of_row += [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells_of_row))
    text = _of_rules(rules) + "\n\n" + by_chance(cells)
    return "\n".join([*lines, "", text.replace("**", "").replace("`", "")])
