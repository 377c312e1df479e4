"""The table of incidents, as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from healcore.tools.report.marking import SIGNS, kind_of
from healcore.tools.report.sound import words
from healcore.tools.report.story import Incident

ROWS = 1000
"""Incidents that get a row; more would make a page that no browser opens."""

_COLUMNS = {
    "Incident": "number",
    "Steps": "steps",
    "Cause": "",
    "Ordered": "",
    "Outcome": "outcome",
    "Skipped": "short",
    "LR ×": "short",
    "Checkpoint": "checkpoint",
    "Batches": "",
    "Evidence": "evidence",
}
"""Name -> class, which says how wide it is."""
_WOULD = {"Ordered": "Would order", "Skipped": "Would skip"}
_NOTHING = "–"
_RATES = 6
"""Multipliers of one incident that are named."""
_BATCHES = 6
"""Stretches of batches that are named."""


def incident_table(incidents: Sequence[Incident], section: int, *, would: bool = False) -> str:
    """All incidents of a story; a row is linked to the plot by its number in `incidents`.

    Args:
        incidents: in the order of the story.
        section: number of the story on its page.
        would: nothing was done, it is what a policy would have done.
    """
    if not incidents:
        return "<p>No incident.</p>"
    rows = [_cells(case, would) for case in incidents[:ROWS]]
    shown = [i for i in range(len(_COLUMNS)) if any(row[i] != _NOTHING for row in rows)]
    columns = {_WOULD.get(name, name) if would else name: kind for name, kind in _COLUMNS.items()}
    names = [(name, kind) for i, (name, kind) in enumerate(columns.items()) if i in shown]
    head = "".join(f'<th scope="col" class="{kind}">{name}</th>' for name, kind in names)
    body = "".join(
        _row([(name, row[i]) for i, (name, _) in zip(shown, names, strict=True)], section, place)
        for place, row in enumerate(rows)
    )
    more = len(incidents) - ROWS
    rest = f"<p>{more} more are in the plot, without a row here.</p>" if more > 0 else ""
    whole = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<table class="incidents">{whole}</table>{rest}'


def _row(cells: Sequence[tuple[str, str]], section: int, place: int) -> str:
    told = "".join(f'<td data-label="{name}">{cell}</td>' for name, cell in cells)
    return f'<tr id="s{section}-i{place}" data-incident="{place}">{told}</tr>'


def _cells(case: Incident, would: bool) -> tuple[str, ...]:
    """As HTML, in the order of the columns."""
    kind = kind_of(case)
    told = SIGNS[kind].told(would)
    if kind == "rollback" and "STOP" in case.action:
        told += ", then stopped" if would else f", then {SIGNS['stop'].words}"
    button = (
        f'<button type="button" title="Show in the plot">'
        f'<span class="sign {kind}" aria-hidden="true"></span>#{case.number}</button>'
        f'<span class="kind">{told}</span>'
    )
    return (
        button,
        escape(span(case.onset_step, case.end[0])),
        escape(words(case.cause)) or _NOTHING,
        escape(", ".join(words([name]) for name in case.action)) or _NOTHING,
        escape(case.outcome) or _NOTHING,
        str(case.skipped),
        escape(_rate(case)),
        _NOTHING if case.checkpoint is None else str(case.checkpoint),
        escape(_batches(case)),
        "<br>".join(escape(each) for each in case.evidence) or _NOTHING,
    )


def span(first: float, last: float) -> str:
    """Steps from one to another, for a person."""
    return f"{first:.0f}" if first == last else f"{first:.0f}–{last:.0f}"


def _rate(case: Incident) -> str:
    if case.lr_after is None or case.lr_after == case.lr_before:
        return _NOTHING
    if len(case.lr_path) > 2:
        path = [f"{rate:.4g}" for rate in case.lr_path]
        if len(path) > _RATES:
            path[_RATES - 2 : -1] = ["…"]
        return " → ".join(path)
    return f"{1.0 if case.lr_before is None else case.lr_before:.4g} → {case.lr_after:.4g}"


def _batches(case: Incident) -> str:
    if not case.batches:
        return _NOTHING
    stretches = list(_stretches(case.batches))
    told = "; ".join(
        f"epoch {epoch}: {span(first, last)}" for epoch, first, last in stretches[:_BATCHES]
    )
    more = len(stretches) - _BATCHES
    told += f"; and {more} more stretches" if more > 0 else ""
    return f"{told} (left out)" if case.left_out else told


def _stretches(batches: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int, int]]:
    """(epoch, first, last) of batches that follow one another."""
    open_: tuple[int, int, int] | None = None
    for epoch, index in sorted(set(batches)):
        if open_ is not None and (epoch, index) == (open_[0], open_[2] + 1):
            open_ = (epoch, open_[1], index)
            continue
        if open_ is not None:
            yield open_
        open_ = (epoch, index, index)
    if open_ is not None:
        yield open_
