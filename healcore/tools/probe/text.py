"""Prints the results of probes in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from healcore.tools.probe.result import ERROR, FAIL, PASS, SKIP, WARN, ProbeResult, ProbeVerdict
from healcore.tools.terminal import clean

_COLOURS = {PASS: "green", WARN: "yellow", FAIL: "red", SKIP: "cyan", ERROR: "magenta"}


def show(results: Sequence[ProbeResult], console: Console) -> None:
    """Prints the results."""
    for result in results:
        console.print(_rendered(result))


def _rendered(result: ProbeResult) -> RenderableType:
    # rich would interpret brackets in a str as markup; a path may contain brackets.
    head = Text.assemble(_label(result.verdict), " ", (clean(result.subject, keep=""), "bold"))
    if result.facts.get("score") is not None:
        head.append(f"  score {result.facts['score']:.2f}")
    checks = Table.grid(padding=(0, 2))
    checks.add_column(no_wrap=True)
    checks.add_column(no_wrap=True)
    checks.add_column(ratio=1, overflow="fold")  # a folded path can be copied whole
    for check in result.checks:
        label = _label(check.verdict) if check.decides else Text("-", "dim")
        checks.add_row(label, check.name.replace("_", " "), Text(clean(check.message, keep="")))
    notes = (Text(clean(f"note: {note}", keep=""), "dim") for note in result.notes)
    return Group(
        head, *(Padding(part, (0, 0, 0, 2)) for part in (checks, *_layers(result.facts), *notes))
    )


def _layers(facts: Mapping[str, Any]) -> list[Table]:
    """A table of the layers that deviate most, if there are any."""
    if not facts.get("top"):
        return []
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("layer", "farthest parameter", "gradient rms", "v-hat / similar", "sigma"):
        table.add_column(title, overflow="fold")
    for layer in facts["top"]:
        cells = (
            layer["layer"],
            layer["parameter"],
            f"{layer['gradient_rms']:.2e}",
            f"{layer['ratio']:.3g}",
            f"{layer['sigmas']:+.1f}",
        )
        table.add_row(*(Text(clean(cell, keep="")) for cell in cells))
    return [table]


def _label(verdict: ProbeVerdict) -> Text:
    return Text(f"{verdict.value:5}", f"bold {_COLOURS[verdict]}")
