"""The command `healcore report run.events.jsonl`.

Exit status: 0 the page is written, 1 it is written without metrics or runs that could not be read,
2 there is nothing to report on, an output cannot be written, or the command line is wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from healcore.tools.cli.options import UNUSABLE, fail
from healcore.tools.output_files import OutputError, check_outputs, replacing
from healcore.tools.terminal import clean, console, echo

if TYPE_CHECKING:  # imported where it is used, so that the other commands start fast
    from healcore.policy import Policy
    from healcore.tools.report.run_report import RunReport

OK, SOME = 0, 1

_PRINTED = 20
"""Problems that are printed; the page lists more."""


def report(
    events: Annotated[
        list[Path],
        typer.Argument(metavar="EVENTS...", help="Events files of runs, or folders with one each."),
    ],
    metrics: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Metrics of the run, or any log of it that replay reads. Default: the "
            "run.metrics.jsonl next to run.events.jsonl, if there is one.",
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
    """One HTML page of a run: curves to zoom into, incidents, policy. It needs no network."""
    from healcore.extras import MissingExtraError, require
    from healcore.policy import PolicyError, load
    from healcore.tools.report.runs import ReportError, find_events, read_reports

    if metrics is not None and len(events) > 1:
        fail("--metrics goes with one events file: leave it out, or name one run")
    try:
        require("report", "jinja2", *(["matplotlib"] if png else []))
        given: Policy | None = None if policy is None else load(policy)
    except (MissingExtraError, PolicyError) as error:
        fail(str(error))
    reports: list[RunReport] = []
    inputs: list[Path] = list(events)
    first: Path | None = None
    failed = False
    for path in events:
        try:
            found = find_events(path)
            with _reading(found):
                read = read_reports(found, metrics=metrics, policy=given)
        except ReportError as error:
            echo(str(error), err=True)
            failed = True
            continue
        first = first or found
        # Metrics and postmortems are next to the events file.
        inputs += [found, *found.parent.glob("*.json"), *found.parent.glob("*.jsonl")]
        reports += read
        failed |= any(each.unreadable for each in read)
        problems = list(dict.fromkeys(note for each in read for note in each.notes))
        for problem in problems[:_PRINTED]:
            echo(problem, err=True)
        if len(problems) > _PRINTED:
            echo(f"and {len(problems) - _PRINTED} more: see the page", err=True)
    if first is None:
        raise typer.Exit(UNUSABLE)
    _write(out, first, png, reports, [*inputs, *(each for each in (metrics, policy) if each)])
    raise typer.Exit(SOME if failed else OK)


def _reading(path: Path) -> contextlib.AbstractContextManager[object]:
    """Shows the file name in a terminal, because a gigabyte of metrics takes a while."""
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
        with replacing(page, named=out is not None) as draft:
            draft.write_text(render(reports), encoding="utf-8", errors="backslashreplace")
        echo(f"page: {page}")
        if png is not None:
            from healcore.tools.report.picture import draw

            with replacing(png) as draft:
                draw(reports, draft)
            echo(f"picture: {png}")
    except OutputError as error:
        fail(str(error))
