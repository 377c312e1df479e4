"""Results for people, in a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from healcore.tools.probe.verdict import Result, Verdict
from healcore.tools.terminal import clean

_COLOURS = {
    Verdict.PASS: "bold green",
    Verdict.WARN: "bold yellow",
    Verdict.FAIL: "bold red",
    Verdict.SKIP: "bold cyan",
    Verdict.ERROR: "bold magenta",
}


def show(results: Sequence[Result], console: Console) -> None:
    """Prints results one below the other, and of several how many there are of each verdict."""
    for result in results:
        console.print(_shown(result))
    if len(results) > 1:
        counted = Counter(result.verdict for result in results)
        line = Text.assemble(*(_counted(each, counted[each]) for each in Verdict if counted[each]))
        console.print(Text.assemble(f"{len(results)} probed: ", line))


def _shown(result: Result) -> RenderableType:
    # Text, not str: brackets in a path are not rich markup.
    head = Text.assemble(_verdict(result.verdict), " ", (clean(result.subject, keep=""), "bold"))
    checks = Table.grid(padding=(0, 2))
    checks.add_column(no_wrap=True)
    checks.add_column(no_wrap=True)
    checks.add_column(ratio=1, overflow="fold")  # a path is to be copied
    for check in result.checks:
        verdict = _verdict(check.verdict) if check.decides else Text("-", "dim")
        checks.add_row(verdict, check.name.replace("_", " "), Text(clean(check.message, keep="")))
    parts: list[RenderableType] = [head, Padding(checks, (0, 0, 0, 2))]
    for title, rows in _tables(result.facts):
        parts.append(Padding(_table(title, rows), (0, 0, 0, 2)))
    parts += [
        Padding(Text(clean(f"note: {note}", keep=""), "dim"), (0, 0, 0, 2)) for note in result.notes
    ]
    return Group(*parts)


def _tables(facts: Mapping[str, Any]) -> list[tuple[Sequence[str], list[Sequence[str]]]]:
    """What a table says better than a sentence."""
    found: list[tuple[Sequence[str], list[Sequence[str]]]] = []
    if facts.get("top"):
        rows: list[Sequence[str]] = [
            (
                each["layer"],
                each["parameter"],
                f"{each['gradient_rms']:.2e}",
                f"{each['ratio']:.3g}",
                f"{each['sigmas']:+.1f}",
            )
            for each in facts["top"]
        ]
        titles = ("layer", "farthest parameter", "gradient rms", "v-hat / its like's", "sigma")
        found.append((titles, rows))
    if facts.get("checkpoints"):
        rows = [
            (
                str(each["step"]),
                each["status"],
                "yes" if each["intact"] else "NO",
                "yes" if each["finite"] else "NO",
                f"{each['bytes']:,}",
            )
            for each in facts["checkpoints"]
        ]
        found.append((("step", "status", "intact", "finite", "bytes"), rows))
    return found


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(Text(clean(cell, keep="")) for cell in row))
    return table


def _verdict(verdict: Verdict) -> Text:
    return Text(f"{verdict.value:5}", _COLOURS[verdict])


def _counted(verdict: Verdict, number: int) -> Text:
    return Text(f"{number} {verdict.value}  ", _COLOURS[verdict])
