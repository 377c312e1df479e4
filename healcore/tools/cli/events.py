"""The commands `healcore events show` and `healcore report run.events.jsonl`.

Exit status: 0 success, 1 `show` found damaged lines or `report` an unreadable run, 2 no file could
be read, the page could not be written, or the command line is invalid. `show --follow` exits with 0
if the run completed, with 1 if it ended in another way, and with 130 after Ctrl-C (typer).
"""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from healcore.tools.output import CANNOT_RUN, check_outputs, echo, fail, report_errors, write_output

if TYPE_CHECKING:  # imported in the functions, so that other commands start fast
    from healcore.events.log import LineProblem

OK, DAMAGED = 0, 1

MAX_PRINTED = 20
"""Limit of the problems of runs that are printed. The page lists more."""
SEVERAL_RUNS = "healcore.reports.html"
"""Page of several runs, in the current folder. It must not replace the page of one of them."""
POLL_INTERVAL = 0.5
"""Seconds between two reads of `--follow`."""

app = typer.Typer(no_args_is_help=True, help="Show the events of a run.")


@app.command()
@report_errors
def show(
    file: Annotated[str, typer.Argument(metavar="RUN", help="A run's events file or folder.")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for new events until the run ends.")
    ] = False,
) -> None:
    """Print a line per event: time, step, kind. Lists damaged lines on standard error."""
    path = _events_path(Path(file), follow)
    if follow:
        raise typer.Exit(_follow(path))
    raise typer.Exit(_show_once(path))


def _events_path(path: Path, follow: bool) -> Path:
    """The events file that a path means. With `follow` the file need not exist yet."""
    from healcore.tools.report.run_report import find_events_file

    if not path.is_dir():
        return path
    in_store = path / "healcore.events.jsonl"  # the name in a store, which a new run creates
    if follow or in_store.exists():
        return in_store
    return find_events_file(path)


def _show_once(path: Path) -> int:
    """Prints the events of a file, and its damaged lines. Returns the exit status."""
    from healcore.events import read

    events_file = read(path)
    damaged = events_file.problems
    if damaged and not events_file.events:
        fail(f"{path} is no events file: line {damaged[0].line}: {damaged[0].problem}")
    if not events_file.events:
        fail(f"{path} is no events file: it is empty")
    _print_events(events_file.events, None)
    _print_damage(damaged)
    if damaged:
        return DAMAGED
    return OK


def _follow(path: Path) -> int:
    """Prints the events of a run until its end. Returns the exit status."""
    from healcore.events import read
    from healcore.events.models import Ending
    from healcore.history import runs_of

    if not path.exists():
        echo(f"{path} does not exist yet: waiting for the run to start (Ctrl-C ends)", err=True)
    events: list[dict[str, Any]] = []
    listed = 0
    gone = False
    while True:
        while not path.exists():
            time.sleep(POLL_INTERVAL)
        seen = events
        events_file = read(path)
        events = events_file.events
        # The start of another file: the file that was read before has been replaced.
        if events[:1] == seen[:1]:
            new = events[len(seen) :]
        else:
            new = events
        printed_process = None
        if seen:
            printed_process = seen[-1]["run"]
        _print_events(new, printed_process)
        # The last line of a live run may not be complete yet.
        damaged = [problem for problem in events_file.problems if "torn:" not in problem.problem]
        _print_damage(damaged[listed:])
        listed = len(damaged)
        history = None
        if events:
            history = runs_of(events_file.by_process())[-1]
        if history is not None and history.end is not None:
            if history.state is Ending.COMPLETED:
                return OK
            return DAMAGED
        if gone and not new:
            echo("the process was killed: it wrote no event of its end", err=True)
            return DAMAGED
        # The process may have written its end before it ended.
        gone = history is not None and history.state is Ending.GONE
        time.sleep(POLL_INTERVAL)


def _print_damage(damaged: Sequence[LineProblem]) -> None:
    """Prints the damaged lines of an events file on standard error."""
    for problem in damaged:
        echo(f"line {problem.line} is damaged: {problem.problem}", err=True)


def _print_events(events: list[dict[str, Any]], process: str | None) -> None:
    """Prints events after an event of `process`, with a line where another process begins."""
    for event in events:
        if event["run"] != process:
            process = event["run"]
            echo(f"run {process}")
        echo(_line(event))


def _line(event: dict[str, Any]) -> str:
    """Formats an event: its time, its step, its kind, and its sentence or its fields as JSON."""
    from healcore.events.kinds import ENVELOPE, sentence
    from healcore.events.models import validate

    fields = {name: value for name, value in event.items() if name not in ENVELOPE}
    text = sentence(validate(event)[0])
    if not text and fields:
        text = json.dumps(fields)
    step = "-"
    if event.get("step") is not None:
        step = _shorten(event["step"], 20)
    time_of_event = str(event.get("time", ""))[:19]
    return f"{time_of_event:19}  {step:>9}  {event['kind']:15}  {_shorten(text)}".rstrip()


def _shorten(value: object, limit: int = 400) -> str:
    """Converts a value to one line of at most `limit` characters."""
    return textwrap.shorten(str(value), limit, placeholder="...")


def report(
    events: Annotated[
        list[Path],
        typer.Argument(metavar="EVENTS...", help="Events files of runs, or folders with one each."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="OUT.html",
            help="Default: run.report.html next to the events; for several EVENTS "
            "healcore.reports.html in the current folder.",
        ),
    ] = None,
) -> None:
    """Write an HTML page about a run: curves, incidents, policy. The page needs no network."""
    from healcore.events.log import stem
    from healcore.tools.report import page_report, run_report
    from healcore.tools.report.page import render

    reports: list[page_report.PageReport] = []
    files: list[Path] = []
    for path in events:
        try:
            file = run_report.find_events_file(path)
            reports += run_report.read_reports(file)
            files.append(file)
        except run_report.ReportError as error:
            echo(str(error), err=True)
    if not files:
        raise typer.Exit(CANNOT_RUN)
    problems: list[str] = []
    for each in reports:
        problems += each.notes
    for problem in problems[:MAX_PRINTED]:
        echo(problem, err=True)
    page = out
    if page is None:
        page = files[0].with_name(f"{stem(files[0])}.report.html")
        if len(events) > 1:  # it belongs to none of the runs
            page = Path(SEVERAL_RUNS)
    # Metrics and postmortems are next to the events file.
    check_outputs([page], [*files, *(file.parent for file in files)])
    write_output(page, render(reports))
    echo(f"page: {page}")
    if len(files) < len(events):
        raise typer.Exit(DAMAGED)
    raise typer.Exit(OK)
