"""The commands `healcore probe loss | optimizer | checkpoint`.

Exit status: 0 pass, 1 warn, 2 fail or an invalid command line, 3 no verdict (too short, nothing to
judge, unreadable). For several results it is the first of FAIL, ERROR, WARN, SKIP, PASS.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from pydantic import BaseModel, ValidationError

from healcore import regular_file
from healcore.core.errors import clean
from healcore.tools.cli.options import ColumnOption, JoinOption
from healcore.tools.output import echo, fail
from healcore.tools.probe.checks import (
    ERROR,
    Check,
    CheckpointInputs,
    LossInputs,
    OptimizerInputs,
    ProbeResult,
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


app = typer.Typer(
    no_args_is_help=True,
    help="Judge a loss curve, an optimizer state or a checkpoint. "
    "Exit status 0 pass, 1 warn, 2 fail, 3 no verdict.",
)


def _add_command(model: type[BaseModel]) -> Callable[[Callable[..., list[ProbeResult]]], None]:
    """Decorator: adds a probe to the app, with `--json` and an option for each field of `model`."""
    options = _options_of(model)

    def add(command: Callable[..., list[ProbeResult]]) -> None:
        def run(json: bool, **arguments: Any) -> None:
            values: dict[str, Any] = {}
            for name in model.model_fields:
                if name in arguments:
                    values[name] = arguments.pop(name)
            inputs = _validate(model, values, arguments.pop("spec", None))
            results = command(inputs=inputs, **arguments)
            if json:
                typer.echo(clean(dumps(results, inputs), "\n", as_json=True))
            else:
                for result in results:
                    _show(result)
            raise typer.Exit(worst(result.verdict for result in results).exit_code)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            if parameter.name != "inputs":
                parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
        # typer reads the options of a command from its signature, and the help from its docstring.
        run.__doc__ = command.__doc__
        run.__signature__ = inspect.Signature([*parameters, *options])  # type: ignore[attr-defined]
        app.command(command.__name__)(run)

    return add


def _options_of(model: type[BaseModel]) -> list[inspect.Parameter]:
    """Builds an option for each field of `model`, and the option `--json`."""
    options: list[inspect.Parameter] = []
    for name, field in model.model_fields.items():
        if isinstance(field.default, dict):  # a table, which only a file can have
            help_ = f"TOML file with these options as keys, and a table '{name}' for the score."
            options.append(_option("spec", Path, metavar="FILE", help=help_))
            continue
        types = {field.annotation, *get_args(field.annotation)}
        help_ = field.description or ""
        # An option that takes no single value takes several patterns.
        kind: Any = list[str]
        metavar: str | None = "PATTERN"
        for known in (bool, int, float):
            if known in types:
                kind = known
                metavar = None
                break
        if kind in (int, float) and field.default is not None:
            help_ += f" [{field.default:g}]"
        options.append(_option(name, kind, help=help_, metavar=metavar))
    options.append(_option("json", bool, help="JSON instead of text."))
    return options


def _option(name: str, kind: Any, **settings: Any) -> inspect.Parameter:
    """Builds a keyword parameter of a command: a flag, or an option that is None if not passed."""
    option = typer.Option(f"--{name.replace('_', '-')}", **settings)
    default: bool | None = False
    if kind is not bool:
        kind = kind | None
        default = None
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, option],
    )


@_add_command(LossInputs)
def loss(
    traces: _Traces, inputs: LossInputs, column: ColumnOption = None, join: JoinOption = False
) -> list[ProbeResult]:
    """Judge a loss curve: does it fall, does it stay low, is its end finite?"""
    from healcore.tools.probe.loss import probe_loss
    from healcore.tools.traces import TraceError, open_traces, parse_columns

    try:
        opened, failed = open_traces(traces, columns=parse_columns(column), join=join)
    except TraceError as error:
        fail(str(error))
    results: list[ProbeResult] = []
    for unreadable in failed:
        check = Check("readable", ERROR, unreadable.problem)
        results.append(ProbeResult("loss", unreadable.path, (check,)))
    for trace in opened:
        results.append(run_probe("loss", trace.name, probe_loss, trace, inputs))
    return results


@_add_command(OptimizerInputs)
def optimizer(checkpoints: _Checkpoints, inputs: OptimizerInputs) -> list[ProbeResult]:
    """Judge the state of Adam or a similar optimizer: are its second moments healthy?"""
    from healcore.tools.probe.checkpoint_files import probe_paths
    from healcore.tools.probe.optimizer import probe_optimizer

    return probe_paths("optimizer", probe_optimizer, checkpoints, inputs)


@_add_command(CheckpointInputs)
def checkpoint(checkpoints: _Checkpoints, inputs: CheckpointInputs) -> list[ProbeResult]:
    """Judge checkpoints: intact, finite, known-good? Changes no file, takes no lock."""
    from healcore.tools.probe.checkpoint import probe_checkpoint
    from healcore.tools.probe.checkpoint_files import probe_paths

    return probe_paths("checkpoint", probe_checkpoint, checkpoints, inputs)


def _validate(model: type[BaseModel], options: dict[str, Any], spec: Path | None) -> BaseModel:
    """The inputs from the options, else the spec, else defaults. Exits if invalid."""
    options = {name: value for name, value in options.items() if value is not None}
    from_spec: dict[str, Any] = {}
    if spec:
        try:
            from_spec = tomllib.loads(regular_file.read(spec, _MAX_SPEC_BYTES).decode())
        except OSError as error:
            fail(f"{spec} cannot be read as a TOML spec: {error.strerror}")
        except (ValueError, RecursionError) as error:
            fail(f"{spec} cannot be read as a TOML spec: {error}")
    try:
        return model(**{**from_spec, **options})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        option = f"{key} in {spec}"
        if key in options:
            option = "--" + key.replace("_", "-")
        fail(f"{option} is {first['input']!r}: {first['msg'].lower()}")


def _show(result: ProbeResult) -> None:
    """Prints the verdict, the checks, the layers that deviate most and the notes."""
    lines = [f"{result.verdict.value:5} {result.subject}"]
    for name, form in (("score", ".2f"), ("initial_loss", ".6g"), ("files", "d")):
        value = result.facts.get(name)
        if value is not None:
            lines[0] += f"  {name.replace('_', ' ')} {value:{form}}"
    for check in result.checks:
        label = "-"
        if check.decides:
            label = check.verdict.value
        lines.append(f"  {label:5}  {check.name.replace('_', ' '):18}  {check.message}")
    for layer in result.facts.get("top", ()):
        lines.append(
            f"  {layer['layer']}: {layer['parameter']} has a gradient rms of "
            f"{layer['gradient_rms']:.2e}, and {layer['ratio']:.3g} times the second moment of "
            f"similar parameters ({layer['sigmas']:+.1f} sigma)"
        )
    lines += [f"  note: {note}" for note in result.notes]
    echo("\n".join(clean(line, keep="") for line in lines))
