"""The command `healcore report run.events.jsonl`.

Exit status: 0 the page was written, 1 the page was written without unreadable runs or metrics, 2 no
run could be read, an output could not be written, or the command line is invalid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from healcore.tools.cli.options import CANNOT_RUN, fail
from healcore.tools.output_files import OutputError, check_outputs, replacing
from healcore.tools.terminal import clean, console, echo

if TYPE_CHECKING:  # a local import, so that other commands start fast
    from healcore.policy import Policy
    from healcore.tools.report.run_report import RunReport

OK, PARTIAL = 0, 1

_MAX_PRINTED = 20
"""Limit of printed problems. The page lists more."""


def report(
    events: Annotated[
        list[Path],
        typer.Argument(metavar="EVENTS...", help="Events files of runs, or folders with one each."),
    ],
    metrics: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Metrics of the run, or any log of the run that replay reads. Default: "
            "run.metrics.jsonl next to run.events.jsonl, if it exists.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="OUT.html", help="Default: run.report.html next to the events."
        ),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="OUT.png", help="Also write a picture.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option("--policy", "-p", help="The run's policy file, unless it used a preset."),
    ] = None,
) -> None:
    """Write an HTML page about a run: curves, incidents, policy. The page needs no network."""
    from healcore.extras import MissingExtraError, require
    from healcore.policy import PolicyError, load
    from healcore.tools.report.runs import ReportError, find_events, read_reports

    if metrics is not None and len(events) > 1:
        fail("--metrics needs exactly one events file: omit --metrics, or name one run")
    try:
        require("report", "jinja2", *(["matplotlib"] if png else []))
        run_policy: Policy | None = None if policy is None else load(policy)
    except (MissingExtraError, PolicyError) as error:
        fail(str(error))
    reports: list[RunReport] = []
    inputs: list[Path] = list(events)
    first: Path | None = None
    failed = False
    for path in events:
        try:
            file = find_events(path)
            with _spinner(file):
                read = read_reports(file, metrics=metrics, policy=run_policy)
        except ReportError as error:
            echo(str(error), err=True)
            failed = True
            continue
        first = first or file
        # Metrics and postmortems are next to the events file.
        inputs += [file, *file.parent.glob("*.json"), *file.parent.glob("*.jsonl")]
        reports += read
        failed |= any(report.unreadable for report in read)
        problems = list(dict.fromkeys(note for report in read for note in report.notes))
        for problem in problems[:_MAX_PRINTED]:
            echo(problem, err=True)
        if len(problems) > _MAX_PRINTED:
            echo(f"and {len(problems) - _MAX_PRINTED} more: see the page", err=True)
    if first is None:
        raise typer.Exit(CANNOT_RUN)
    _write(out, first, png, reports, [*inputs, *filter(None, (metrics, policy))])
    raise typer.Exit(PARTIAL if failed else OK)


def _spinner(path: Path) -> contextlib.AbstractContextManager[object]:
    """Context manager: shows the file name in a terminal, because large files take a while."""
    from rich.text import Text

    printer = console(stderr=True)
    if not printer.is_terminal:
        return contextlib.nullcontext()
    return printer.status(Text(clean(f"reading {path.name}")))


def _write(
    out: Path | None,
    events: Path,
    png: Path | None,
    reports: Sequence[RunReport],
    inputs: Sequence[str | Path],
) -> None:
    from healcore.events.metrics import stem
    from healcore.tools.report.page import render

    page = out or events.with_name(f"{stem(events)}.report.html")
    try:
        check_outputs([page, *([png] if png else [])], inputs)
        with replacing(page, from_user=out is not None) as draft:
            draft.write_text(render(reports), encoding="utf-8", errors="backslashreplace")
        echo(f"page: {page}")
        if png is not None:
            from healcore.tools.report.picture import draw

            with replacing(png) as draft:
                draw(reports, draft)
            echo(f"picture: {png}")
    except OutputError as error:
        fail(str(error))
