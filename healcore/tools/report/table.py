"""The table of incidents: its columns, and the cells of a row as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from healcore.history import Incident, IncidentOutcome
from healcore.tools.report import words
from healcore.tools.report.marks import SIGNS

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


class Row(NamedTuple):
    """One incident."""

    number: int
    outcome: IncidentOutcome
    text: str
    """The outcome in a few words."""
    cells: tuple[tuple[str, ...], ...]
    """After the first; each has its lines."""


class Table(NamedTuple):
    """The incidents of a run; a row is linked to the plot by its place."""

    columns: tuple[tuple[str, str], ...]
    """Name and class."""
    rows: tuple[Row, ...]
    more: int
    """Incidents without a row."""


def incident_table(incidents: Sequence[Incident], *, would: bool) -> Table:
    """The table; columns with nothing in them are left out.

    Args:
        incidents: in order.
        would: nothing was done, it is what a policy would have done.
    """
    rows = [_cells(case) for case in incidents[:ROWS]]
    shown = [i for i in range(len(_COLUMNS) - 1) if any(row[i] != (_NOTHING,) for row in rows)]
    first, *others = _COLUMNS.items()
    columns = [(_WOULD.get(name, name) if would else name, kind) for name, kind in others]
    return Table(
        (first, *(columns[i] for i in shown)),
        tuple(
            Row(case.number, case.outcome, _text(case, would), tuple(row[i] for i in shown))
            for case, row in zip(incidents, rows, strict=False)
        ),
        max(len(incidents) - ROWS, 0),
    )


def _text(case: Incident, would: bool) -> str:
    text = SIGNS[case.outcome].text(would)
    if case.outcome is IncidentOutcome.ROLLBACK and "STOP" in case.action:
        stopped = "stopped" if would else SIGNS[IncidentOutcome.STOP].words
        text += f", then {stopped}"
    return text


def _cells(case: Incident) -> list[tuple[str, ...]]:
    """In the order of the columns, without the first."""
    cells = (
        words.steps(case.onset_step, case.end[0]),
        words.words(case.cause),
        ", ".join(words.words([name]) for name in case.action),
        words.outcome(case),
        str(case.skipped),
        _rate(case),
        "" if case.checkpoint is None else str(case.checkpoint),
        _batches(case),
    )
    evidence = tuple(words.evidence(each) for each in case.evidence)
    return [*((cell or _NOTHING,) for cell in cells), evidence or (_NOTHING,)]


def _rate(case: Incident) -> str:
    if case.lr_after == case.lr_before:
        return ""
    path = [f"{rate:.4g}" for rate in case.lr_path]
    if len(path) > _RATES:
        path[_RATES - 2 : -1] = ["…"]
    return " → ".join(path)


def _batches(case: Incident) -> str:
    stretches = list(_stretches(case.batches))
    text = "; ".join(
        f"epoch {epoch}: {words.steps(first, last)}" for epoch, first, last in stretches[:_BATCHES]
    )
    more = len(stretches) - _BATCHES
    text += f"; and {more} more stretches" if more > 0 else ""
    return f"{text} (left out)" if text and case.left_out else text


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
