"""The title of a page and, of several runs, the overview at its top."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from healcore.history import Mode
from healcore.tools.report import words
from healcore.tools.report.report import RunReport


class Overview(NamedTuple):
    """A table with a row for each run."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """The first cell is the run's short name."""
    titles: tuple[str, ...]
    """The name in full, of each row."""


def overview(reports: Sequence[RunReport]) -> Overview:
    """The overview.

    Args:
        reports: in the order of the page.
    """
    ends = "Ends at" if all(each.mode is Mode.REPLAY for each in reports) else "Ending"
    heads = ("Run", "Policy", "Rows", "Incidents", "Rollbacks", "Skips", "Clips", ends)
    rows = tuple(
        (name, *_cells(report)) for name, report in zip(short_names(reports), reports, strict=True)
    )
    return Overview(heads, rows, tuple(report.title for report in reports))


def _cells(report: RunReport) -> tuple[str, ...]:
    counts = report.counts
    rollbacks = (str(counts.rollbacks), words.repeats(counts, would=report.would))
    return (
        report.policy_name,
        rows_of(report),
        str(counts.incidents),
        ", ".join(each for each in rollbacks if each),
        f"{counts.skips:,}",
        "–" if counts.clips is None else f"{counts.clips:,}",
        words.ends(report) or "–",
    )


def weight(report: RunReport) -> tuple[int, int, int]:
    """To sort by: the run in which most happened has the least."""
    return -report.counts.rollbacks, -report.counts.incidents, -report.counts.skips


def title_of(reports: Sequence[RunReport]) -> str:
    """The title of a page."""
    if len(reports) == 1:
        return short_names(reports)[0]
    return f"{len(reports)} {'replays' if reports[0].mode is Mode.REPLAY else 'runs'}"


def short_names(reports: Sequence[RunReport]) -> list[str]:
    """Names as short as they may be: the end of a path, or all of it where two would be alike."""
    ends = ["/".join(each.title.split("/")[-2:]) for each in reports]
    whole = {end: {r.title for r, e in zip(reports, ends, strict=True) if e == end} for end in ends}
    return [
        end if len(whole[end]) == 1 else each.title for each, end in zip(reports, ends, strict=True)
    ]


def rows_of(report: RunReport) -> str:
    """How many rows a run has."""
    rows = report.curves.rows
    return f"{len(report.curves.step) if rows is None else rows:,}"
