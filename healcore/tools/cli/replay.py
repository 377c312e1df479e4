"""The commands `healcore replay TRACE... --policy NAME|FILE` and `healcore sweep`.

Exit status: 0 all traces were replayed, 1 a trace could not be read, or has too few values to be
judged, 2 the policy or the command line is invalid, no trace could be replayed, or an output could
not be written.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from healcore.console import first_lines, first_of
from healcore.tools.cli.options import ColumnOption, JoinOption, JsonlOption, SetOption
from healcore.tools.output import AnyPath, check_outputs, console, echo, fail, write_output

if TYPE_CHECKING:  # imported in the functions, so that other commands start fast
    from rich.console import Console
    from rich.table import Table

    from healcore.policy import Policy
    from healcore.tools.replay import Summary
    from healcore.tools.report.page_report import PageReport
    from healcore.tools.traces import Trace
    from healcore.tools.traces.trace import Unreadable

OK, PARTIAL = 0, 1

MAX_PRINTED = 20
"""Limit of the problems of traces that are printed."""
_PIPE_WIDTH = 160
"""Width of a table in columns if the width of the output is unknown."""


def replay_command(
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
    jsonl: JsonlOption = None,
    report: Annotated[
        Path | None, typer.Option(metavar="OUT.html", help="Write an HTML page.")
    ] = None,
    column: ColumnOption = None,
    join: JoinOption = False,
) -> None:
    """Show what a policy would have done in recorded runs. Changes no file of a run."""
    from healcore.policy import load
    from healcore.policy.loader import parse_overrides

    names = policy or ["default"]
    values = parse_overrides(set_ or (), "--set")
    policies = {name: load(name, **values) for name in names}
    if len(policies) < len(names):
        fail("a policy is repeated: name each --policy once")
    _replay_traces(traces, policies, jsonl, report, column, join)


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
    jsonl: JsonlOption = None,
    column: ColumnOption = None,
    join: JoinOption = False,
) -> None:
    """Replay variants of a policy, and show the sums of each over all traces."""
    from healcore.policy import load
    from healcore.policy.loader import parse_overrides
    from healcore.tools.replay.variants import variants

    base = load(policy, **parse_overrides(set_ or (), "--set"))
    _replay_traces(traces, variants(base, vary), jsonl, None, column, join, sums_only=True)


def _replay_traces(
    traces: list[str],
    policies: dict[str, Policy],
    jsonl: str | None,
    report: Path | None,
    column: list[str] | None,
    join: bool,
    *,
    sums_only: bool = False,
) -> NoReturn:
    """Replays each policy over each trace; prints and writes the results.

    Args:
        traces: paths of logs, or folders with one run each.
        policies: the policies by their name in the results.
        jsonl: file for a JSON object per decision, "-" for standard output, or None.
        report: file for an HTML page, or None.
        column: options SIGNAL=NAME that name a column of the logs, or None.
        join: whether all traces are attempts of one run.
        sums_only: whether the table shows only the sums over all traces.
    """
    from healcore.adapter_registry import require
    from healcore.tools.traces import open_traces, parse_columns

    if report:
        require("report", "jinja2")
    outputs: list[AnyPath] = []
    if jsonl and jsonl != "-":
        outputs.append(jsonl)
    if report:
        outputs.append(report)
    check_outputs(outputs, [*traces, *policies])
    opened, unreadable = open_traces(traces, columns=parse_columns(column), join=join)
    results = _Results()
    for failure in unreadable:
        results.add_unreadable(failure)
    for trace, name in itertools.product(opened, policies):
        results.add_replay(trace, policies[name], name, lines=bool(jsonl), page=bool(report))
    if results.summaries:
        # Files before the table, whose reader may end early (`| head`).
        _write(results, jsonl, report)
        width = _PIPE_WIDTH
        if sys.stdout.isatty() or os.environ.get("COLUMNS"):
            width = None  # rich finds the width
        printer = console(stderr=jsonl == "-", width=width)
        _print(printer, opened, policies, results.summaries, sums_only)
        if report:
            printer.print(f"page: {report}", markup=False, highlight=False)
    for problem in _without_repeats(results.problems):
        echo(problem, err=True)
    if not results.summaries and not results.has_unjudged:
        fail("no trace could be replayed")
    if results.problems:
        raise typer.Exit(PARTIAL)
    raise typer.Exit(OK)


@dataclass
class _Results:
    """What the replays of one command have found, in the order of the traces and the policies."""

    summaries: list[Summary] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """The lines of `--jsonl`."""
    reports: list[PageReport] = field(default_factory=list)
    """The runs on the page of `--report`."""
    problems: list[str] = field(default_factory=list)
    """A sentence for each path that could not be read, and each trace that was not replayed."""
    has_unjudged: bool = False
    """Whether a log could be read, but has too few values for a verdict."""

    def add_unreadable(self, failure: Unreadable) -> None:
        """Adds a path without a usable trace to the problems."""
        prefix = f"{failure.path}: "
        if failure.not_judged:
            self.has_unjudged = True
            prefix += "not judged: "
        self.problems.append(f"{prefix}{failure.problem}")

    def add_replay(
        self, trace: Trace, policy: Policy, name: str, *, lines: bool, page: bool
    ) -> None:
        """Replays a policy over a trace, and adds the results.

        The rows of a replay are not kept, because a command may read many long logs. So the lines
        and the report are made here, if they are wanted.
        """
        from healcore.tools.replay import ReplayError, replay

        try:
            result = replay(trace, policy, name=name)
        except ReplayError as error:
            self.problems.append(str(error))
            return
        self.summaries.append(result.summary)
        for clause in result.summary.missing.values():
            self.problems.append(
                f"{trace.name}: not judged: {clause}, which may be NaN that was not written. Write "
                "nan, or cut these rows"
            )
        if lines:
            self.lines += result.lines()
        if page:
            self.reports.append(result.report())


def _write(results: _Results, jsonl: str | None, report: Path | None) -> None:
    """Writes the decisions to `jsonl` and the page to `report`, if these are given."""
    if jsonl == "-":
        sys.stdout.writelines(results.lines)
    elif jsonl:
        write_output(jsonl, "".join(results.lines))
    if report:
        from healcore.tools.report import page

        write_output(report, page.render(results.reports))


def _print(
    printer: Console,
    traces: Sequence[Trace],
    policies: Mapping[str, Policy],
    summaries: Sequence[Summary],
    sums_only: bool,
) -> None:
    """Prints the first alarms, the table, problems and notes, and the legend of the table.

    In a sweep the sums are the answer, so the first alarms follow the table.
    """
    from healcore.tools.replay import table

    problems: list[str] = []
    notes: list[str] = []
    for trace in traces:
        problems += trace.problems
        notes += trace.notes
    first_alarms = table.first_alarms(summaries)
    if not sums_only:
        _print_first(printer, first_alarms, "bold")
        _print_first(printer, table.unalarmed_rises(traces, summaries), "yellow")
        printer.print()
    _print_whole(printer, table.summary_table(summaries, sums_only=sums_only))
    _print_first(printer, problems, "yellow")
    if sums_only:
        _print_first(printer, first_alarms, "")
    _print_first(printer, table.notes(summaries), "")
    if not sums_only:
        _print_first(printer, table.limits_of_replay(policies, summaries), "dim")
    _print_first(printer, notes, "dim")
    printer.print(table.LEGEND, style="dim", highlight=False)


def _print_whole(printer: Console, table: Table) -> None:
    """Prints a table. A narrow terminal wraps its lines, so that no number is cut."""
    unlimited = printer.options.update_width(1 << 12)
    if printer.measure(table, options=unlimited).minimum > printer.width:
        # The column of names is the only one that may wrap.
        table.columns[0].min_width = 12
        table.width = printer.measure(table, options=unlimited).minimum
    printer.print(table, crop=False)


def _print_first(printer: Console, lines: Sequence[str], style: str) -> None:
    for line in first_lines(_without_repeats(lines), MAX_PRINTED):
        printer.print(line, style=style, markup=False, highlight=False)


# A line about a place: "run.csv, line 7: the text".
_PLACED = re.compile(r"(?P<path>.*?)(?:, line \d+)?: (?P<text>.*)", re.DOTALL)


def _without_repeats(lines: Sequence[str]) -> list[str]:
    """Merges lines about different places that say the same, and names the first places."""
    places: dict[str, list[str]] = {}
    first: dict[str, str] = {}
    for line in lines:
        place, text = "", line
        placed = _PLACED.fullmatch(line)
        if placed:
            place, text = placed["path"], placed["text"]
        places.setdefault(text, []).append(place)
        first.setdefault(text, line)
    merged = []
    for text, line in first.items():
        place, *others = places[text]
        different = [other for other in dict.fromkeys(others) if other != place]
        if different:
            trace = f"{place.rpartition(', ')[0]}, "  # of the line: not repeated
            names = [other.removeprefix(trace) for other in different]
            line += f" (also {first_of(names)})"
        elif others:  # lines of one file
            line += f" (and {len(others):,} more like this)"
        merged.append(line)
    return merged
