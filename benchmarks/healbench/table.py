"""The results as Markdown: the promise per family first, then every task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.healbench.comparing import (
    CAP,
    MARGIN,
    NOISE,
    OFF,
    OURS,
    Cell,
    Rule,
    geometric_mean,
    percent,
    shown,
)

BEGIN = "<!-- {}: begin (written by python -m benchmarks.healbench) -->"
END = "<!-- {}: end -->"
MAIN = (OFF, *OURS)
"""The columns of the big tables; the peers have tables of their own."""
OTHER = ", peers"


def headline(cells: Sequence[Cell], rules: Sequence[Rule]) -> str:
    """The promise, and one row for each family."""
    parts = ["### The promise\n\n" + _of_rules(rules)]
    for kind, (title, about, family) in HEADLINES.items():
        arms = (*OURS, "healer_pretraining") if kind == "healthy" else (*MAIN, "healer_pretraining")
        some = [cell for cell in cells if cell.task.kind == kind and cell.arm in arms]
        if some:
            parts.append(f"### {title}\n\n{about}\n\n" + markdown(_families(some, family)))
    return "\n\n".join(parts)


def as_markdown(cells: Sequence[Cell], rules: Sequence[Rule]) -> str:
    """The generated part of docs/healbench.md.

    Args:
        cells: of `compare`.
        rules: of `comparing.rules`.
    """
    parts = [f"{sum(len(cell.runs) for cell in cells):,} runs.", headline(cells, rules)]
    for title, arms in (("", lambda arm: arm in MAIN), (OTHER, lambda a: a not in MAIN)):
        for kind, text in (("healthy", _healthy_text), ("sick", _sick_text)):
            some = [cell for cell in cells if cell.task.kind == kind and arms(cell.arm)]
            if some:
                rows = _grid(some, text)
                if kind == "healthy" and not title:
                    _add_same(rows, some)
                parts.append(f"### {kind.capitalize()} tasks{title}\n\n{LEGENDS[kind, title]}")
                parts.append(markdown(rows))
    acting = [cell for cell in cells if interventions(cell) != "-"]
    if acting:
        parts.append("### What the arms did\n\n" + INTERVENTIONS)
        parts.append(markdown(_grid(acting, interventions)))
    # No table of processor time: the arms run at different hours and loads. The cost of a step is
    # measured by benchmarks/step_overhead.py, which interleaves the variants in one process.
    parts.append("### The tasks\n\n" + _abouts(cells))
    notes = {f"- {cell.name}, {cell.arm}: {note}": None for cell in cells for note in _notes(cell)}
    if notes:
        parts.append("### Why runs stopped or failed\n\n" + "\n".join(notes))
    return "\n\n".join(parts) + "\n"


def _of_rules(rules: Iterable[Rule]) -> str:
    lines = []
    for rule in rules:
        state = "not checked" if not rule.checked else "holds" if rule.holds else "**broken**"
        lines.append(f"- {rule.text}: {state} ({rule.checked} checked)")
        lines += [f"    - {where}" for where in rule.broken]
    return "\n".join(lines)


def _families(cells: Sequence[Cell], text: Callable[[list[Cell]], str]) -> list[list[str]]:
    """One row for each family, one column for each arm, and a row for all families."""
    arms = sorted({cell.arm for cell in cells}, key=_place)
    families = list(dict.fromkeys(cell.task.family for cell in cells))
    rows = [["family", *(f"`{arm}`" for arm in arms)]]
    for family in (*families, ""):
        some = [c for c in cells if not family or c.task.family == family]
        by_arm = ([cell for cell in some if cell.arm == arm] for arm in arms)
        rows.append([family or "**all**", *(text(each) if each else "" for each in by_arm)])
    return rows


def _healthy_family(cells: list[Cell]) -> str:
    compared = [cell for cell in cells if not math.isnan(cell.against.percent)]
    if not compared:
        return "no run that is off"
    worst = max(compared, key=lambda cell: cell.against.percent)
    holding = sum(cell.holds for cell in compared)
    text = f"{holding} of {len(compared)}; worst {percent(worst.against.percent)}"
    text += f" ({worst.name})" if worst.against.percent > NOISE else ""
    text = text if holding == len(compared) else f"**{text}**"
    same = [each for cell in compared for each in cell.same.values()]
    return text + (f"; same bits {sum(same)} of {len(same)}" if same else "")


def _sick_family(cells: list[Cell]) -> str:
    ratios = [cell for cell in cells if cell.ratios]
    if not ratios:
        return "no undamaged run"
    worst = max(ratios, key=lambda cell: cell.ratio)
    lost = sum(ratio >= CAP for cell in ratios for ratio in cell.ratios.values())
    text = f"{geometric_mean(c.ratio for c in ratios):.3f}; worst {worst.ratio:.3g} ({worst.name})"
    return text + (f"; {lost} lost" if lost else "")


HEADLINES: dict[str, tuple[str, str, Callable[[list[Cell]], str]]] = {
    "healthy": (
        "Healthy tasks: on against off, by family",
        "Number of tasks that hold, number of tasks in the family, and the largest mean "
        f"difference. A task does not hold if it is worse by more than {NOISE:g} % beyond two "
        f"standard errors or by more than {MARGIN:g} %. It does not hold either if a run fails or "
        "ends at a reduced learning rate. *Same bits*: runs whose metric and weights end bit for "
        "bit as without healcore.",
        _healthy_family,
    ),
    "sick": (
        "Sick tasks: metric over the undamaged run, by kind of fault",
        "Geometric mean over tasks and seeds, then the worst task. 1 is a perfect cure. A ratio "
        f"counts as {CAP:g} at most; runs with this ratio are *lost*.",
        _sick_family,
    ),
}
LEGENDS = {
    ("healthy", ""): """\
Mean held-out metric over the seeds (lower is better), and the difference from `nothing`, the same \
run without healcore. **Bold**: the task does not hold. The last column is the share of runs of \
each arm whose metric and weights end bit for bit as without healcore.""",
    ("healthy", OTHER): """\
Held-out metric (lower is better), and the difference from `nothing`. One seed: there is no \
standard error.""",
    ("sick", ""): "Mean held-out metric over the seeds, and the ratio to the undamaged run.",
    ("sick", OTHER): "Held-out metric, and the ratio to the undamaged run of `nothing`. One seed.",
}
"""By kind of task, and the ending of the title."""
INTERVENTIONS = (
    "First the skips of finite and of non-finite steps per 10,000 steps. Then, summed over all "
    "seeds: cuts of the learning rate, runs that ended at a reduced rate, rollbacks, and stopped "
    "runs. `-` means no intervention."
)


def _grid(cells: Sequence[Cell], text: Callable[[Cell], str]) -> list[list[str]]:
    """Tasks as rows, arms as columns; empty where there is no result."""
    arms = sorted(dict.fromkeys(cell.arm for cell in cells), key=_place)
    rows = [["task", *(f"`{arm}`" for arm in arms)]]
    for name in dict.fromkeys(cell.name for cell in cells):
        its = {cell.arm: cell for cell in cells if cell.name == name}
        rows.append([name, *(text(its[arm]) if arm in its else "" for arm in arms)])
    return rows


def _place(arm: str) -> int:
    return MAIN.index(arm) if arm in MAIN else len(MAIN)


def _add_same(rows: list[list[str]], cells: Sequence[Cell]) -> None:
    """Adds the column of runs that end bit for bit as without healcore."""
    rows[0].append("ends bit for bit as without healcore: " + ", ".join(OURS))
    for row in rows[1:]:
        its = {cell.arm: cell.same for cell in cells if cell.name == row[0]}
        same = [its[arm] for arm in OURS if its.get(arm)]
        row.append(", ".join(f"{sum(each.values())}/{len(each)}" for each in same))


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "not finite"


def _healthy_text(cell: Cell) -> str:
    if not cell.available:
        return "unavailable"
    text = _number(cell.mean)
    if cell.arm != OFF and not math.isnan(cell.against.percent):
        text += f" ({shown(cell.against)})"
    return _with_failures(cell, text, cell.arm in OURS and not cell.holds)


def _sick_text(cell: Cell) -> str:
    if not cell.available:
        return "unavailable"
    text = _number(cell.mean)
    if cell.ratios:
        text += f" (× {cell.ratio:.3g})" if cell.ratio < CAP else " (lost)"
    return _with_failures(cell, text, False)


def _with_failures(cell: Cell, text: str, bold: bool) -> str:
    if cell.failed:
        text += f" {len(cell.failed)}/{len(cell.runs)} failed"
    return f"**{text}**" if bold else text


def interventions(cell: Cell) -> str:
    """Skips per 10,000 steps, cuts, rollbacks and stops; only those there are."""
    parts, steps = [], cell.total("steps") or 1
    skips = [1e4 * cell.total(name) / steps for name in ("finite_skips", "nonfinite_skips")]
    if any(skips):
        parts.append("skips {:.2g} + {:.2g}".format(*skips))
    counts = {
        "cuts": cell.total("lr_cuts"),
        "ended low": cell.rate_left_low,
        "rollbacks": cell.total("rollbacks"),
        "stops": sum(bool(run.stopped) for run in cell.runs),
    }
    return ", ".join(parts + [f"{name} {count}" for name, count in counts.items() if count]) or "-"


def _abouts(cells: Iterable[Cell]) -> str:
    tasks = {cell.name: cell.task for cell in cells}
    rows = [["task", "family", "kind", "metric", "what it is"]]
    for name, task in tasks.items():
        rows.append([f"`{name}`", task.family, task.kind, task.metric, task.about])
    return markdown(rows)


def _notes(cell: Cell) -> list[str]:
    """The first reason why a run of the cell stopped or failed."""
    return [run.error or run.stopped for run in cell.runs if run.error or run.stopped][:1]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its heading."""
    lines = ["| " + " | ".join(each.replace("|", "\\|") for each in row) + " |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join(lines)


def write_between(path: Path, text: str, name: str = "healbench") -> None:
    """Replaces what is between the two marks of a page; a page without marks gets them at its end.

    Raises:
        ValueError: only one of the marks is there, or they are the wrong way round.
    """
    first, last = BEGIN.format(name), END.format(name)
    page = path.read_text() if path.exists() else "# healbench\n"
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not begin and last not in page:
        before, after = page.rstrip("\n") + "\n\n", "\n"
    elif not end:
        raise ValueError(f"{path} needs both marks, in this order: {first} and {last}")
    path.write_text(f"{before}{first}\n\n{text}\n{last}{after}")
