"""The command `healcore replay TRACE... --policy NAME|FILE`.

Exit status: 0 all traces were replayed, 1 a trace could not be read or judged, 2 the policy or the
command line is invalid, no trace could be replayed, or an output could not be written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from healcore.tools.cli.options import (
    ColumnOption,
    JoinOption,
    SetOption,
    fail,
    parse_columns,
    parse_overrides,
)
from healcore.tools.output_files import OutputError
from healcore.tools.terminal import echo

if TYPE_CHECKING:  # local imports, so that other commands start fast
    from healcore.policy import Policy
    from healcore.tools.replay.command import Outputs, ReplayResult
    from healcore.tools.traces import Trace, Unreadable

OK, PARTIAL = 0, 1


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
    from healcore.extras import MissingExtraError
    from healcore.policy import PolicyError
    from healcore.tools.replay.command import Outputs
    from healcore.tools.traces import TraceError, open_traces

    outputs = Outputs(jsonl, report)
    try:
        policies = _policies(policy or ["default"], parse_overrides(set_))
        outputs.check([*traces, *(policy or [])])
        opened, unreadable = open_traces(traces, columns=parse_columns(column), join=join)
    except (PolicyError, MissingExtraError, TraceError, ValueError) as error:
        fail(str(error))
    try:
        results, more = _run(opened, policies, outputs)
    except BrokenPipeError:
        # The reader of `--jsonl -` has ended, and Python's flush at exit would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(OK) from None
    except (OSError, OutputError, MissingExtraError) as error:
        fail(str(error))
    for failure in (*unreadable, *more):
        echo(f"{failure.path}: {failure.problem}", err=True)
    if not results:
        fail("no trace could be replayed")
    raise typer.Exit(PARTIAL if unreadable or more else OK)


def _run(
    opened: Sequence[Trace], policies: Mapping[str, Policy], outputs: Outputs
) -> tuple[list[ReplayResult], list[Unreadable]]:
    """Replays the traces, writes the files and prints the table."""
    from healcore.tools.replay.command import ReplayResult, replay_all, show, write_page

    results: list[ReplayResult] = []
    failed: list[Unreadable] = []
    with outputs.lines() as file:
        for result in replay_all(opened, policies, file, reports=outputs.report is not None):
            if isinstance(result, ReplayResult):
                results.append(result)
            else:
                failed.append(result)
    if results:
        # Before the table, whose reader may end early (`| head`).
        page = write_page(outputs.report, results) if outputs.report else None
        printer = outputs.console()
        show(printer, [result.summary for result in results], opened)
        if page:
            printer.print(page, markup=False, highlight=False)
    return results, failed


def _policies(names: Sequence[str], overrides: Any) -> dict[str, Policy]:
    from healcore.policy import load

    repeated = [name for i, name in enumerate(names) if name in names[:i]]
    if repeated:
        raise ValueError(f"--policy {repeated[0]} is repeated: name each policy once")
    return {name: load(name, **overrides) for name in names}
