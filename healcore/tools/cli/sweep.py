"""The command `healcore sweep TRACE... --policy NAME|FILE --vary KEY=LOW..HIGH`.

Exit status: 0 all traces were swept, 1 a trace could not be read, 2 the policy, a key or the
command line is invalid, no trace could be swept, or the output could not be written.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from healcore import regular_file
from healcore.tools.cli.options import (
    ColumnOption,
    JoinOption,
    SetOption,
    fail,
    parse_columns,
    parse_overrides,
    progress_bar,
)
from healcore.tools.output_files import OutputError, check_outputs, replacing
from healcore.tools.terminal import console, echo, echo_json

if TYPE_CHECKING:  # local imports, so that other commands start fast
    from healcore.tools.sweep import Sweep

OK, PARTIAL = 0, 1

_DEFAULT_OUTPUT = Path("swept.toml")

_PIPE_WIDTH = 120
"""Width of the tables in characters if standard output is not a terminal."""


def sweep(
    traces: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE...",
            help="Logs of runs, as for replay, from several recipes and including healthy runs.",
        ),
    ],
    policy: Annotated[
        str, typer.Option("--policy", "-p", help="The base policy: a preset or a TOML file.")
    ] = "pretraining",
    set_: SetOption = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=LOW..HIGH",
            help="A number to vary: detect.divergence.rise=5..12 (optionally :log or :linear) or "
            "max_skips=5,10,20. Repeatable. Default: the thresholds of the rollback rules.",
        ),
    ] = None,
    variants: Annotated[int, typer.Option(min=2, help="Number of variants.")] = 2000,
    labels: Annotated[
        Path | None,
        typer.Option(
            metavar="LABELS.json", help="Known faults. Default: spikes found in hindsight."
        ),
    ] = None,
    objective: Annotated[
        str, typer.Option(help="Ranking: balance, recall, false or lost.")
    ] = "balance",
    within: Annotated[
        int, typer.Option(min=0, help="Steps within which a fault must be found.")
    ] = 10,
    price: Annotated[
        float,
        typer.Option(
            min=0.0, help="For balance: recall that a false recovery per 10,000 steps costs."
        ),
    ] = 0.1,
    recovery: Annotated[
        int,
        typer.Option(
            "--recovery-steps",
            min=0,
            max=1_000_000_000,
            help="For lost: steps that a recovery costs.",
        ),
    ] = 100,
    holdout: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="Share of the families to hold out.")
    ] = 0.3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of held-out runs.")] = 0,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT.toml", help="File for the best policy.")
    ] = _DEFAULT_OUTPUT,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT.toml if it exists.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
    backend: Annotated[
        str | None,
        typer.Option(help="numpy or jax, with equal results. Default: jax for large sweeps."),
    ] = None,
    column: ColumnOption = None,
    join: JoinOption = False,
) -> None:
    """Find the best thresholds for recorded runs, and check them on held-out runs."""
    from healcore.extras import MissingExtraError
    from healcore.policy import PolicyError, load
    from healcore.tools.replay.scores import LabelError, read_labels
    from healcore.tools.sweep import Costs, Plan, SweepError, sweep
    from healcore.tools.traces import TraceError, open_traces

    try:
        base = load(policy, **parse_overrides(set_))
        _check_output(output, overwrite, [*traces, *([str(labels)] if labels else [])])
        known = read_labels(labels) if labels else None
        opened, unreadable = open_traces(traces, columns=parse_columns(column), join=join)
        for failure in unreadable:
            echo(f"{failure.path}: {failure.problem}", err=True)
        plan = Plan(
            variants=variants,
            objective=objective,
            price=price,
            costs=Costs(within, recovery),
            holdout=holdout,
            seed=seed,
            backend=backend,
        )
        with progress_bar() as bar:
            task = bar.add_task("sweeping", total=None)
            result = sweep(
                opened,
                base,
                vary=vary or (),
                labels=known,
                plan=plan,
                started=lambda total: bar.update(task, total=total),
                advance=lambda done: bar.advance(task, done),
            )
        _write(_text(result, policy), output)
    except (PolicyError, LabelError, MissingExtraError, SweepError, TraceError) as error:
        fail(str(error))
    for failure in result.failed:
        echo(failure.problem, err=True)
    _show(result, output, as_json=as_json)
    raise typer.Exit(PARTIAL if unreadable or result.failed else OK)


def _show(result: Sweep, output: Path, *, as_json: bool) -> None:
    from healcore.tools.sweep.report import render, to_json

    if as_json:
        document = to_json(result) | {"written": str(output)}
        echo_json(json.dumps(document, indent=2, allow_nan=False))
        return
    printer = console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    printer.print(render(result))
    same = "" if result.verdict.take else ", equal to the base policy"
    printer.print(f"policy written: {output}{same}", markup=False, soft_wrap=True)


def _check_output(output: Path, overwrite: bool, inputs: list[str]) -> None:
    """Exits if the output exists or cannot be written, before the work starts."""
    if output.is_dir() or output.suffix != ".toml":
        fail(f"--output {output}: must be a file whose name ends in .toml")
    try:
        # The policy is not an input here, because --overwrite may replace it.
        check_outputs([output], inputs)
    except OutputError as error:
        fail(f"--output {error}")
    if os.path.lexists(output) and not overwrite:
        fail(f"--output {output} exists: add --overwrite, or name another file with -o")


def _text(result: Sweep, policy: str) -> str:
    """Returns the best policy as TOML. The base policy keeps its comments."""
    from healcore.policy import dumps, loads, preset_names, preset_text, recipe_names

    if result.verdict.take:
        return dumps(result.policy)
    preset = policy in (*preset_names(), *recipe_names())
    text = preset_text(policy) if preset else regular_file.read(Path(policy)).decode()
    # The user may have edited the file during the sweep.
    return text if loads(text) == result.policy else dumps(result.policy)


def _write(text: str, output: Path) -> None:
    try:
        with replacing(output, from_user=output != _DEFAULT_OUTPUT) as draft:
            draft.write_text(text, encoding="utf-8")
    except OutputError as error:
        fail(f"--output {error}")
