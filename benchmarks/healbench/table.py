"""The results: the promise as Markdown, and a table with a row for each task."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import shorten

from benchmarks.healbench.comparing import CAP, OFF, OURS, Cell, Rule, shown

BEGIN = "<!-- {}: begin (written by python -m benchmarks.healbench) -->"
END = "<!-- {}: end -->"
MAIN = (OFF, *OURS)
"""The columns of the table."""


def promise(rules: Iterable[Rule]) -> str:
    """Each rule, and what breaks it."""
    lines = []
    for rule in rules:
        state = "not checked" if not rule.checked else "holds" if rule.holds else "**broken**"
        lines.append(f"- {rule.text}: {state} ({rule.checked} checked)")
        where = [shorten(each, 80, placeholder=" …") for each in rule.broken]
        lines[-1] += f": {'; '.join(where)}" if where else ""
    return "\n".join(lines)


def as_markdown(cells: Sequence[Cell], rules: Sequence[Rule]) -> str:
    """The generated part of docs/healbench.md.

    Args:
        cells: of `compare`.
        rules: of `comparing.rules`.
    """
    return f"{sum(len(cell.runs) for cell in cells):,} runs.\n\n{promise(rules)}\n"


def write_tasks(path: Path, cells: Sequence[Cell]) -> None:
    """Writes the table of the tasks as CSV."""
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(tasks(cells))


def tasks(cells: Sequence[Cell]) -> list[list[str]]:
    """The heading, and one row for each task."""
    arms = [f"`{arm}`" for arm in MAIN]
    rows = [["task", "family", "metric", *arms, "same bits", "what it is"]]
    for name in dict.fromkeys(cell.name for cell in cells):
        its = {cell.arm: cell for cell in cells if cell.name == name}
        task = next(iter(its.values())).task
        same = [its[arm].same.values() for arm in OURS if arm in its and its[arm].same]
        rows.append(
            [
                f"`{name}`",
                task.family,
                task.metric,
                *(_text(its[arm]) if arm in its else "" for arm in MAIN),
                ", ".join(f"{sum(each)}/{len(each)}" for each in same),
                task.about,
            ]
        )
    return rows


def _text(cell: Cell) -> str:
    """The mean metric of an arm, and its difference or its ratio."""
    if not cell.available:
        return "unavailable"
    text = f"{cell.mean:.3g}" if math.isfinite(cell.mean) else "not finite"
    if cell.task.kind == "healthy":
        if cell.arm != OFF and not math.isnan(cell.against.percent):
            text += f" ({shown(cell.against)})"
    elif cell.ratios:
        text += f" (× {cell.ratio:.3g})" if cell.ratio < CAP else " (lost)"
    if cell.failed:
        text += f" {len(cell.failed)}/{len(cell.runs)} failed"
    kept = cell.holds or cell.arm == OFF or cell.task.kind == "faulty"
    return text if kept else f"**{text}**"


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
