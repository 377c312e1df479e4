"""The command `healcore sweep TRACE... --policy NAME|FILE --vary KEY=LOW..HIGH`.

Exit status: 0 everything was swept, 1 some trace could not be read, 2 there is no such policy or
key, nothing could be swept, the output cannot be written, or the command line is wrong.
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
    Column,
    Join,
    Set,
    columns_of,
    fail,
    overrides_of,
    progress_bar,
)
from healcore.tools.output_files import OutputError, check_outputs, replacing
from healcore.tools.terminal import console, echo, echo_json

if TYPE_CHECKING:  # imported where they are used, so that the other commands start fast
    from healcore.tools.sweep import Sweep

OK, SOME = 0, 1

_DEFAULT_OUTPUT = Path("swept.toml")

_PIPE_WIDTH = 120
"""Width of the tables in characters if standard output is no terminal."""


def sweep(
    traces: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE...",
            help="Logs of runs, as for replay: several recipes, and healthy runs among them.",
        ),
    ],
    policy: Annotated[
        str, typer.Option("--policy", "-p", help="The base policy: a preset or a TOML file.")
    ] = "pretraining",
    set_: Set = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=LOW..HIGH",
            help="A number to vary, as in detect.divergence.rise=5..12 (:log or :linear after it) "
            "or max_skips=5,10,20. Repeat it. Default: the thresholds behind the rollback rules.",
        ),
    ] = None,
    variants: Annotated[int, typer.Option(min=2, help="Settings to try.")] = 2000,
    labels: Annotated[
        Path | None,
        typer.Option(
            metavar="LABELS.json", help="Known events. Default: spikes found in hindsight."
        ),
    ] = None,
    objective: Annotated[
        str, typer.Option(help="What to rank by: balance, recall, false or lost.")
    ] = "balance",
    within: Annotated[
        int, typer.Option(min=0, help="Steps within which an event counts as found in time.")
    ] = 10,
    price: Annotated[
        float,
        typer.Option(
            min=0.0, help="For balance: the recall that a false recovery per 10,000 steps costs."
        ),
    ] = 0.1,
    recovery: Annotated[
        int,
        typer.Option(
            "--recovery-steps",
            min=0,
            max=1_000_000_000,
            help="For lost: the steps that a recovery costs.",
        ),
    ] = 100,
    holdout: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="Share of the families to hold out; 0 for none.")
    ] = 0.3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of held-out runs.")] = 0,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT.toml", help="The policy to take.")
    ] = _DEFAULT_OUTPUT,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT.toml if it exists.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
    backend: Annotated[
        str | None,
        typer.Option(help="numpy or jax; the results are equal. Default: jax for much work."),
    ] = None,
    column: Column = None,
    join: Join = False,
) -> None:
    """Which thresholds would have served these runs best, checked on runs held out."""
    from healcore.extras import MissingExtraError
    from healcore.policy import PolicyError, load
    from healcore.tools.replay.scores import LabelError, read_labels
    from healcore.tools.sweep import Costs, Plan, SweepError, sweep
    from healcore.tools.traces import TraceError, open_traces

    try:
        base = load(policy, **overrides_of(set_))
        _check_output(output, overwrite, [*traces, *([str(labels)] if labels else [])])
        known = read_labels(labels) if labels else None
        opened, unreadable = open_traces(traces, columns=columns_of(column), join=join)
        for each in unreadable:
            echo(f"{each.path}: {each.problem}", err=True)
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
            found = sweep(
                opened,
                base,
                vary=vary or (),
                labels=known,
                plan=plan,
                started=lambda total: bar.update(task, total=total),
                advance=lambda done: bar.advance(task, done),
            )
        _write(_text(found, policy), output)
    except (PolicyError, LabelError, MissingExtraError, SweepError, TraceError) as error:
        fail(str(error))
    for each in found.failed:
        echo(each.problem, err=True)
    _show(found, output, as_json=as_json)
    raise typer.Exit(SOME if unreadable or found.failed else OK)


def _show(found: Sweep, output: Path, *, as_json: bool) -> None:
    from healcore.tools.sweep.report import render, to_json

    if as_json:
        document = to_json(found) | {"written": str(output)}
        echo_json(json.dumps(document, indent=2, allow_nan=False))
        return
    printer = console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    printer.print(render(found))
    printer.print(f"policy written: {output}", markup=False, soft_wrap=True)


def _check_output(output: Path, overwrite: bool, inputs: list[str]) -> None:
    """Refuses an output that exists or cannot be written, before the work starts."""
    if output.is_dir() or output.suffix != ".toml":
        fail(f"--output {output}: must be a file that ends in .toml, as policies do")
    try:
        # The policy file itself is not an input here: with --overwrite it may be the output.
        check_outputs([output], inputs)
    except OutputError as error:
        fail(f"--output {error}")
    if os.path.lexists(output) and not overwrite:
        fail(f"--output {output} exists already: add --overwrite, or name another file with -o")


def _text(found: Sweep, policy: str) -> str:
    """The text of the policy to write; the base policy keeps its comments."""
    from healcore.policy import dumps, loads, preset_names, preset_text, recipe_names

    if found.verdict.take:
        return dumps(found.policy)
    preset = policy in (*preset_names(), *recipe_names())
    text = preset_text(policy) if preset else regular_file.read(Path(policy)).decode()
    # The file may have changed during the sweep.
    return text if loads(text) == found.policy else dumps(found.policy)


def _write(text: str, output: Path) -> None:
    try:
        with replacing(output, named=output != _DEFAULT_OUTPUT) as draft:
            draft.write_text(text, encoding="utf-8")
    except OutputError as error:
        fail(f"--output {error}")
