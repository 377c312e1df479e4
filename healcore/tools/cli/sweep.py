"""The command `healcore sweep TRACE... --policy NAME|FILE --vary KEY=A,B,C`.

Exit status: 0 all traces were swept, 1 a trace could not be read or judged, 2 the policy, a key or
the command line is invalid, or no trace could be swept.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from healcore.tools.cli.options import (
    ColumnOption,
    JoinOption,
    SetOption,
    fail,
    parse_columns,
    parse_overrides,
)
from healcore.tools.terminal import console, echo, echo_json

OK, PARTIAL = 0, 1

_PIPE_WIDTH = 120
"""Width of the table in characters if standard output is not a terminal."""


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
    from healcore.policy import PolicyError, load
    from healcore.tools.sweep import SweepError, variants
    from healcore.tools.sweep.scores import LabelError, read_labels
    from healcore.tools.sweep.table import rows_of, table
    from healcore.tools.traces import TraceError, open_traces

    try:
        base = load(policy, **parse_overrides(set_))
        settings = variants(base, vary)
        known = read_labels(labels) if labels else []
        opened, failed = open_traces(traces, columns=parse_columns(column), join=join)
    except (PolicyError, LabelError, SweepError, TraceError) as error:
        fail(str(error))
    rows = list(rows_of(opened, settings, known, failed))
    for problem in dict.fromkeys(f"{each.path}: {each.problem}" for each in failed):
        echo(problem, err=True)
    if not rows:
        fail("no trace could be swept")
    if as_json:
        echo_json(json.dumps(rows, indent=2, allow_nan=False))
    else:
        width = None if sys.stdout.isatty() else _PIPE_WIDTH
        console(width=width, highlight=False).print(table(rows, base.name))
    raise typer.Exit(PARTIAL if failed else OK)
