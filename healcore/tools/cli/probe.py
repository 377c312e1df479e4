"""The commands `healcore probe loss | optimizer | checkpoint`.

Exit status: 0 pass, 1 warn, 2 fail or an invalid command line, 3 no verdict (too short, nothing to
judge, unreadable). For several results it is the first of FAIL, ERROR, WARN, SKIP, PASS.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from healcore import regular_file
from healcore.core.errors import clean
from healcore.tools.cli.options import ColumnOption, JoinOption
from healcore.tools.output import echo, fail
from healcore.tools.probe.checks import (
    ERROR,
    Check,
    CheckpointInputs,
    Inputs,
    LossInputs,
    OptimizerInputs,
    Report,
    dumps,
    run_probe,
    worst,
)

_MAX_SPEC_BYTES = 1 << 20

_Checkpoints = Annotated[
    list[Path],
    typer.Argument(
        metavar="CHECKPOINT",
        help="torch or safetensors files, or directories of DCP, Orbax, Trainer or a store.",
    ),
]
_Traces = Annotated[
    list[str],
    typer.Argument(metavar="TRACE", help="Logs of runs, in any format that replay reads."),
]
_Spec = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="TOML file with these options as keys, and a table 'weights' for the score.",
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


app = typer.Typer(
    no_args_is_help=True,
    help="Judge a loss curve, an optimizer state or a checkpoint. "
    "Exit status 0 pass, 1 warn, 2 fail, 3 no verdict.",
)


def _add_command(model: type[Inputs]) -> Callable[[Callable[..., list[Report]]], None]:
    """Decorator: adds a probe to the app, with `--json` and an option for each field of `model`."""

    def add(command: Callable[..., list[Report]]) -> None:
        def run(json: bool = False, spec: Path | None = None, **arguments: Any) -> None:
            given: dict[str, Any] = {}
            for name in model.model_fields:
                value = arguments.pop(name, None)
                if value is not None:
                    given[name] = value
            inputs = _validate(model, given, spec)
            reports = command(inputs=inputs, **arguments)
            if json:
                typer.echo(clean(dumps(reports, inputs), "\n", as_json=True))
            else:
                for report in reports:
                    _show(report)
            raise typer.Exit(worst(report.verdict for report in reports).exit_code)

        parameters = dict(inspect.signature(command, eval_str=True).parameters)
        parameters["json"] = parameters.pop("inputs").replace(
            name="json", annotation=_Json, default=False
        )
        for name, field in model.model_fields.items():
            if name == "weights":  # a table, which only the spec can have
                annotation: Any = _Spec
                name = "spec"
            else:
                shown = field.default is not None and str(field.default)
                option = typer.Option(
                    f"--{name.replace('_', '-')}", help=field.description, show_default=shown
                )
                annotation = Annotated[field.annotation | None, option]
            parameters[name] = inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
            )
        ordered = [
            each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters.values()
        ]
        # typer reads the options of a command from its signature, and the help from its docstring.
        run.__doc__ = command.__doc__
        run.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        app.command(command.__name__)(run)

    return add


@_add_command(LossInputs)
def loss(
    traces: _Traces,
    inputs: LossInputs,
    column: ColumnOption = None,
    join: JoinOption = False,
) -> list[Report]:
    """Judge a loss curve: does it fall, does it stay low, is its end finite?"""
    from healcore.tools.probe.loss import probe_loss
    from healcore.tools.traces import TraceError, open_traces, parse_columns

    try:
        opened, failed = open_traces(traces, columns=parse_columns(column), join=join)
    except TraceError as error:
        fail(str(error))
    reports: list[Report] = []
    for unreadable in failed:
        check = Check("readable", ERROR, unreadable.problem)
        reports.append(Report("loss", unreadable.path, (check,)))
    for trace in opened:
        reports.append(run_probe("loss", trace.name, probe_loss, trace, inputs))
    return reports


@_add_command(OptimizerInputs)
def optimizer(checkpoints: _Checkpoints, inputs: OptimizerInputs) -> list[Report]:
    """Judge the state of Adam or a similar optimizer: are its second moments healthy?"""
    from healcore.tools.probe.checkpoint_files import probe_paths
    from healcore.tools.probe.optimizer import probe_optimizer

    return probe_paths("optimizer", probe_optimizer, checkpoints, inputs)


@_add_command(CheckpointInputs)
def checkpoint(checkpoints: _Checkpoints, inputs: CheckpointInputs) -> list[Report]:
    """Judge checkpoints: intact, finite, known-good? Changes no file, takes no lock."""
    from healcore.tools.probe.checkpoint import probe_checkpoint
    from healcore.tools.probe.checkpoint_files import probe_paths

    return probe_paths("checkpoint", probe_checkpoint, checkpoints, inputs)


def _validate(model: type[Inputs], given: dict[str, Any], spec: Path | None) -> Inputs:
    """The inputs from the options, else the spec, else defaults. Exits if invalid."""
    try:
        values = {}
        if spec:
            values = tomllib.loads(regular_file.read(spec, _MAX_SPEC_BYTES).decode())
        return model(**{**values, **given})
    except ValidationError as error:
        first = error.errors()[0]
        fail(f"{'.'.join(map(str, first['loc']))} is {first['input']!r}: {first['msg'].lower()}")
    except (OSError, ValueError, RecursionError) as error:
        fail(f"{spec} cannot be read as a TOML spec: {error}")


def _show(report: Report) -> None:
    """Prints the verdict, the checks, the layers that deviate most and the notes."""
    lines = [f"{report.verdict.value:5} {report.subject}"]
    for name, value in (("score", report.score), *report.facts.items()):
        if type(value) is int or (name == "score" and value is not None):
            lines[0] += f"  {name.replace('_', ' ')} {value:.6g}"
    for check in report.checks:
        name = check.name.replace("_", " ")
        lines.append(f"  {check.verdict.value:5}  {name:18}  {check.message}")
    for layer in report.facts.get("top", ()):
        lines.append(
            "  {layer}: {parameter} has {ratio:.3g} times the second moment of similar "
            "parameters ({sigmas:+.1f} sigma)".format(**layer)
        )
    lines += [f"  note: {note}" for note in report.notes]
    echo("\n".join(clean(line, keep="") for line in lines))
