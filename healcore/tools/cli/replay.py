"""The commands `healcore replay TRACE... --policy NAME|FILE` and `healcore sweep`.

Exit status: 0 all traces were replayed, 1 a trace could not be read, or has too few values to be
judged, 2 the policy or the command line is invalid, no trace could be replayed, or an output could
not be written.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from healcore.console import first_lines
from healcore.tools.cli.options import ColumnOption, JoinOption, JsonlOption, SetOption
from healcore.tools.output import AnyPath, check_outputs, console, echo, fail, write_output

if TYPE_CHECKING:  # imported in the functions, so that other commands start fast
    from rich.console import Console

    from healcore.policy import Policy
    from healcore.tools.replay import Summary
    from healcore.tools.traces import Trace

OK, PARTIAL = 0, 1

MAX_PRINTED = 20
"""Limit of the problems of traces that are printed."""
MAX_VARIANTS = 100
"""Largest number of variants. Nobody reads a larger table, and the best of many settings is the
best by chance."""
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

    base = load(policy, **parse_overrides(set_ or (), "--set"))
    _replay_traces(traces, variants(base, vary), jsonl, None, column, join, sums_only=True)


def variants(policy: Policy, vary: Sequence[str]) -> dict[str, Policy]:
    """Makes all combinations of the values of some keys.

    Args:
        policy: the base policy.
        vary: options `KEY=A,B,C` with the dotted keys of a policy file.

    Returns:
        The base policy by its name, then each variant by its settings, such as
        "clip.max_norm=0.5 mode=observe". The last option varies fastest.

    Raises:
        PolicyError: an option has another form, a value is invalid, or there are more than
            `MAX_VARIANTS` variants.
    """
    from healcore.policy import load
    from healcore.policy.loader import parse_overrides
    from healcore.policy.reading import policy_error

    axes: list[list[str]] = []
    for option in vary:
        key, _, values = option.partition("=")
        settings = [f"{key.strip()}={value.strip()}" for value in values.split(",")]
        axes.append(list(dict.fromkeys(settings)))  # without a value that is given twice
    count = math.prod(map(len, axes))
    if count > MAX_VARIANTS:
        rule = f"at most {MAX_VARIANTS} variants"
        raise policy_error(
            "on the command line", f"{count:,} variants", rule, "fewer values of --vary"
        )
    policies = {policy.name: policy}
    for settings in itertools.product(*axes):
        policies[" ".join(settings)] = load(policy, **parse_overrides(settings, "--vary"))
    return policies


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
    from healcore.tools.replay import ReplayError, replay
    from healcore.tools.report import page
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
    failures: list[str] = []  # each costs the exit status
    for failure in unreadable:
        prefix = f"{failure.path}: "
        if failure.not_judged:
            prefix += "not judged: "
        failures.append(f"{prefix}{failure.problem}")
    # The rows of a replay are not kept, because a command may read many long logs.
    summaries, lines, reports = [], [], []
    for trace in opened:
        for name, policy in policies.items():
            try:
                result = replay(trace, policy, name=name)
            except ReplayError as error:
                failures.append(str(error))
                continue
            summaries.append(result.summary)
            for clause in result.summary.missing.values():
                failures.append(
                    f"{trace.name}: not judged: {clause}, which may be NaN that was not written. "
                    "Write nan, or cut these rows"
                )
            if jsonl:
                lines += result.lines()
            if report:
                reports.append(result.report())
    if summaries:
        # Files before the table, whose reader may end early (`| head`).
        if jsonl == "-":
            sys.stdout.writelines(lines)
        elif jsonl:
            write_output(jsonl, "".join(lines))
        if report:
            write_output(report, page.render(reports))
        width = _PIPE_WIDTH
        if sys.stdout.isatty() or os.environ.get("COLUMNS"):
            width = None  # rich finds the width
        printer = console(stderr=jsonl == "-", width=width)
        _print(printer, opened, summaries, sums_only)
        if report:
            printer.print(f"page: {report}", markup=False, highlight=False)
    for failure in dict.fromkeys(failures):
        echo(failure, err=True)
    if not summaries and not any(each.not_judged for each in unreadable):
        fail("no trace could be replayed")
    if failures:
        raise typer.Exit(PARTIAL)
    raise typer.Exit(OK)


def _print(
    printer: Console, traces: Sequence[Trace], summaries: Sequence[Summary], sums_only: bool
) -> None:
    """Prints the first alarms, the table, problems and notes, and the legend of the table.

    In a sweep the sums are the answer, so the first alarms follow the table.
    """
    from healcore.tools.replay import table

    answers = table.answers(traces, summaries)
    if not sums_only:
        _print_first(printer, answers, "bold")
    shown = table.summary_table(summaries, sums_only=sums_only)
    unlimited = printer.options.update_width(1 << 12)
    if printer.measure(shown, options=unlimited).minimum > printer.width:
        # A narrow terminal wraps the lines, so that no number is cut.
        shown.columns[0].min_width = 12
        shown.width = printer.measure(shown, options=unlimited).minimum
    printer.print()
    printer.print(shown, crop=False)
    if sums_only:
        _print_first(printer, answers, "")
    for trace in traces:
        _print_first(printer, trace.problems, "yellow")
        _print_first(printer, trace.notes, "dim")
    _print_first(printer, table.notes(summaries), "")
    printer.print(table.LEGEND, style="dim", highlight=False)


def _print_first(printer: Console, lines: Iterable[str], style: str) -> None:
    for line in first_lines(list(dict.fromkeys(lines)), MAX_PRINTED):
        printer.print(line, style=style, markup=False, highlight=False)
