"""The command `healcore report run.events.jsonl`.

Exit status: 0 the page was written, 1 the page was written without unreadable runs, 2 no run could
be read, an output could not be written, or the command line is invalid.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from healcore.tools.cli.options import CANNOT_RUN
from healcore.tools.output import check_outputs, echo, replacing

OK, PARTIAL = 0, 1

_MAX_PRINTED = 20
"""Limit of printed problems. The page lists more."""


def report(
    events: Annotated[
        list[Path],
        typer.Argument(metavar="EVENTS...", help="Events files of runs, or folders with one each."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="OUT.html", help="Default: run.report.html next to the events."
        ),
    ] = None,
) -> None:
    """Write an HTML page about a run: curves, incidents, policy. The page needs no network."""
    from healcore.events.metrics import stem
    from healcore.tools.report.page import render
    from healcore.tools.report.run_report import (
        ReportError,
        RunReport,
        find_events,
        read_reports,
    )

    reports: list[RunReport] = []
    files: list[Path] = []
    for path in events:
        try:
            file = find_events(path)
            reports += read_reports(file)
            files.append(file)
        except ReportError as error:
            echo(str(error), err=True)
    if not files:
        raise typer.Exit(CANNOT_RUN)
    for problem in [note for each in reports for note in each.notes][:_MAX_PRINTED]:
        echo(problem, err=True)
    page = out or files[0].with_name(f"{stem(files[0])}.report.html")
    # Metrics and postmortems are next to the events file.
    inputs = [path for file in files for path in (file, *file.parent.glob("*.json*"))]
    check_outputs([page], inputs)
    with replacing(page) as draft:
        draft.write_text(render(reports), encoding="utf-8", errors="backslashreplace")
    echo(f"page: {page}")
    raise typer.Exit(OK if len(files) == len(events) else PARTIAL)
