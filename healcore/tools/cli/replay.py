"""The commands `healcore replay TRACE... --policy NAME|FILE` and `healcore sweep`.

Exit status: 0 all traces were replayed, 1 a trace could not be read or judged, 2 the policy or the
command line is invalid, no trace could be replayed, or an output could not be written.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from healcore.tools.cli.options import (
    ColumnOption,
    JoinOption,
    SetOption,
    fail,
    parse_columns,
    parse_overrides,
)
from healcore.tools.output_files import OutputError, check_outputs, replacing
from healcore.tools.terminal import console, echo, echo_json

if TYPE_CHECKING:  # local imports, so that other commands start fast
    from rich.console import Console

    from healcore.policy import Policy

OK, PARTIAL = 0, 1

MAX_PRINTED = 20
"""Number of problems of traces that are printed."""
MAX_ON_PAGE = 60
"""Number of replays on one page, because a browser is slow with more."""
_PIPE_WIDTH = 160
"""Width of a table in columns if the width of the output is unknown."""


def replay(
    traces: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE...",
            help="Logs of runs: CSV, JSON lines, trainer_state.json, TensorBoard event files, "
            "W&B exports, or folders with one run each.",
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            show_default="default",
            help="A preset or a TOML file. Repeat to compare policies.",
        ),
    ] = None,
    set_: SetOption = None,
    jsonl: Annotated[
        str | None,
        typer.Option(metavar="OUT", help="Write a JSON object per decision; - is standard output."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="OUT.html", help="Write an HTML page.")
    ] = None,
    column: ColumnOption = None,
    join: JoinOption = False,
) -> None:
    """Show what a policy would have done in recorded runs. Changes no file of a run."""
    from healcore.extras import MissingExtraError, require
    from healcore.policy import PolicyError
    from healcore.tools.replay import ReplayError, table
    from healcore.tools.replay import replay as replay_trace
    from healcore.tools.replay.report import replay_report
    from healcore.tools.traces import TraceError, open_traces

    names = policy or ["default"]
    try:
        policies = {name: _load(name, set_) for name in names}
        for name in policies:
            if names.count(name) > 1:
                fail(f"--policy {name} is repeated: name each policy once")
        if report:
            require("report", "jinja2")
        outputs = [jsonl if jsonl != "-" else None, report]
        check_outputs(filter(None, outputs), [*traces, *names])
        opened, unreadable = open_traces(traces, columns=parse_columns(column), join=join)
    except (PolicyError, MissingExtraError, TraceError, OutputError) as error:
        fail(str(error))
    problems = [f"{each.path}: {each.problem}" for each in unreadable]
    summaries, reports, lines = [], [], []
    for trace in opened:
        for name in names:
            try:
                result = replay_trace(trace, policies[name], name=name)
            except ReplayError as error:
                problems.append(str(error))
                continue
            summaries.append(result.summary)
            if jsonl:
                lines += result.lines()
            if report and len(reports) < MAX_ON_PAGE:
                reports.append(replay_report(result, policies[name]))
    try:
        if summaries:
            # Before the table, whose reader may end early (`| head`).
            page = _write_files(jsonl, lines, report, reports, len(summaries))
            known = sys.stdout.isatty() or os.environ.get("COLUMNS")
            printer = console(stderr=jsonl == "-", width=None if known else _PIPE_WIDTH)
            printer.print(table.summary_table(summaries))
            _print_first(printer, [each for t in opened for each in t.problems], "yellow")
            for line in table.notes(summaries):
                printer.print(line, markup=False, highlight=False)
            _print_first(printer, [each for trace in opened for each in trace.notes], "dim")
            printer.print(table.LEGEND, style="dim", highlight=False)
            if page:
                printer.print(page, markup=False, highlight=False)
    except BrokenPipeError:
        # The reader of `--jsonl -` has ended, and Python's flush at exit would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(OK) from None
    except (OSError, OutputError, MissingExtraError) as error:
        fail(str(error))
    _finish(problems, any_result=bool(summaries))


def _load(name: str, pairs: list[str] | None) -> Policy:
    from healcore.policy import load

    return load(name, **parse_overrides(pairs))


def _write_files(
    jsonl: str | None, lines: Sequence[str], page: Path | None, reports: Sequence, count: int
) -> str:
    """Writes the outputs. Returns a line about the page, or an empty string without a page."""
    if jsonl == "-":
        sys.stdout.writelines(lines)
    elif jsonl:
        with replacing(jsonl) as draft:
            draft.write_text("".join(lines), encoding="ascii", newline="\n")
    if page is None:
        return ""
    from healcore.tools.report.page import render

    with replacing(page) as draft:
        draft.write_text(render(reports, left_out=count - len(reports)), encoding="utf-8")
    return f"page: {page}" + f" (the first {len(reports)} replays)" * (len(reports) < count)


def _print_first(printer: Console, lines: Sequence[str], style: str) -> None:
    shown = list(lines[:MAX_PRINTED])
    if len(lines) > len(shown):
        shown.append(f"and {len(lines) - len(shown):,} more like these")
    for line in shown:
        printer.print(line, style=style, markup=False, highlight=False)


def _finish(problems: Sequence[str], *, any_result: bool) -> NoReturn:
    for problem in dict.fromkeys(problems):
        echo(problem, err=True)
    if not any_result:
        fail("no trace could be replayed")
    raise typer.Exit(PARTIAL if problems else OK)


def sweep(
    traces: Annotated[
        list[str], typer.Argument(metavar="TRACE...", help="Logs of runs, as for replay.")
    ],
    vary: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=A,B,C",
            help="Values of a number: max_skips=5,10,20. Repeatable: all combinations are tried, "
            "at most 100.",
        ),
    ],
    policy: Annotated[
        str, typer.Option("--policy", "-p", help="The base policy: a preset or a TOML file.")
    ] = "pretraining",
    set_: SetOption = None,
    labels: Annotated[
        Path | None,
        typer.Option(metavar="LABELS.json", help="Known faults, by which variants are scored."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
    column: ColumnOption = None,
    join: JoinOption = False,
) -> None:
    """Count what variants of a policy would have done in recorded runs. Writes no file."""
    from healcore.policy import PolicyError
    from healcore.tools.replay import vary as variation
    from healcore.tools.replay.scores import LabelError, read_labels
    from healcore.tools.traces import TraceError, open_traces

    try:
        base = _load(policy, set_)
        policies = variation.variants(base, vary)
        known = read_labels(labels) if labels else []
        opened, unreadable = open_traces(traces, columns=parse_columns(column), join=join)
    except (PolicyError, LabelError, variation.VaryError, TraceError) as error:
        fail(str(error))
    problems = [f"{each.path}: {each.problem}" for each in unreadable]
    rows = list(variation.count_variants(opened, policies, known, problems))
    if as_json and rows:
        echo_json(json.dumps(rows, indent=2, allow_nan=False))
    elif rows:
        width = None if sys.stdout.isatty() else _PIPE_WIDTH
        printer = console(width=width, highlight=False)
        printer.print(variation.variant_table(rows, base.name))
    _finish(problems, any_result=bool(rows))
