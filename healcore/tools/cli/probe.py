"""The commands `healcore probe loss | optimizer | checkpoint`.

Exit status: 0 pass, 1 warn, 2 fail, 3 no verdict (too short, nothing to judge, unreadable, or an
invalid command line). For several results it is the first of FAIL, ERROR, WARN, SKIP, PASS.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_args

import typer
from pydantic import BaseModel, ValidationError
from typer.core import TyperGroup

from healcore.plugins.checkpoint_contents import ProbeError
from healcore.tools.cli.options import ColumnOption, JoinOption, fail, parse_columns
from healcore.tools.probe.inputs import CheckpointInputs, LossInputs, OptimizerInputs, read_spec
from healcore.tools.terminal import echo_json

if TYPE_CHECKING:  # local imports, so that other commands start fast
    from healcore.tools.probe.result import ProbeResult

NO_VERDICT = 3

_UsageError: Any = typer.BadParameter.__bases__[0]
"""Click's `UsageError`. From typer, because newer releases of typer include a copy of click."""


@contextlib.contextmanager
def _no_verdict() -> Iterator[None]:
    """Context manager: an invalid command line exits with 3, because click's 2 means FAIL here."""
    try:
        yield
    except _UsageError as error:
        error.exit_code = NO_VERDICT
        raise


class Group(TyperGroup):
    """The group of all probes."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parses the part of the command line before the probe."""
        with _no_verdict():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Parses the rest of the command line, and runs the probe."""
        with _no_verdict():
            return super().invoke(ctx)


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Judge a loss curve, an optimizer state or a checkpoint. "
    "Exit status 0 pass, 1 warn, 2 fail, 3 no verdict.",
)


def _add_command(model: type[BaseModel]) -> Callable[[Callable[..., list[Any]]], None]:
    """Decorator: adds a probe to the app, with `--json` and an option for each field of `model`."""
    options = []
    for name, field in model.model_fields.items():
        if isinstance(field.default, dict):
            continue  # a table, only in a spec
        types = {field.annotation, *get_args(field.annotation)}
        help_, metavar = field.description or "", None
        kind: Any = next((known for known in (bool, int, float) if known in types), None)
        if kind is None:
            kind, metavar = list[str], "PATTERN"
        elif kind is not bool and field.default is not None:
            help_ += f" [{field.default:g}]"
        option = typer.Option(f"--{name.replace('_', '-')}", metavar=metavar, help=help_)
        options.append(_keyword(name, kind, option))
    options.append(_keyword("as_json", bool, typer.Option("--json", help="JSON instead of text.")))

    def add(command: Callable[..., list[Any]]) -> None:
        own = [*inspect.signature(command, eval_str=True).parameters.values()]

        def run(as_json: bool, **arguments: Any) -> None:
            values = {name: arguments.pop(name) for name in model.model_fields if name in arguments}
            inputs = _validate(model, values, arguments.get("spec"))
            _finish(command(inputs=inputs, **arguments), inputs, as_json)

        own = [each.replace(kind=each.KEYWORD_ONLY) for each in own if each.name != "inputs"]
        run.__doc__ = command.__doc__
        run.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
        app.command(command.__name__)(run)

    return add


def _keyword(name: str, kind: Any, option: Any) -> inspect.Parameter:
    """An option of typer, with the default False or None."""
    flag = kind is bool
    annotation = Annotated[kind if flag else kind | None, option]
    default = False if flag else None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


@_add_command(LossInputs)
def loss(
    traces: Annotated[
        list[str],
        typer.Argument(metavar="TRACE", help="Logs of runs, in any format that replay reads."),
    ],
    inputs: LossInputs,
    column: ColumnOption = None,
    join: JoinOption = False,
    spec: Annotated[
        Path | None,
        typer.Option(
            "--spec",
            metavar="FILE",
            help="TOML file with the options below as keys, and the score's [weights].",
        ),
    ] = None,
) -> list[Any]:
    """Judge a loss curve: does it fall, does it stay low, does it end well?"""
    del spec  # `inputs` has its values
    from healcore.tools.probe.loss import probe_loss
    from healcore.tools.probe.result import ERROR, Check, ProbeResult, judged
    from healcore.tools.traces import TraceError, open_traces

    try:
        opened, failed = open_traces(traces, columns=parse_columns(column), join=join)
    except TraceError as error:
        _fail(str(error))
    unreadable = [
        ProbeResult("loss", each.path, (Check("readable", ERROR, each.problem),)) for each in failed
    ]
    return unreadable + [judged("loss", trace.name, probe_loss, trace, inputs) for trace in opened]


@_add_command(OptimizerInputs)
def optimizer(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(
            metavar="CHECKPOINT",
            help="torch or safetensors files, or directories of DCP, Orbax, Trainer or a store.",
        ),
    ],
    inputs: OptimizerInputs,
) -> list[Any]:
    """Judge the state of Adam or a similar optimizer: are its second moments healthy?"""
    from healcore.tools.probe.limited_process import probe_paths
    from healcore.tools.probe.optimizer import judge

    return probe_paths("optimizer", judge, checkpoints, inputs)


@_add_command(CheckpointInputs)
def checkpoint(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(
            metavar="CHECKPOINT",
            help="Stores, checkpoints of a store, or checkpoints of other programs.",
        ),
    ],
    inputs: CheckpointInputs,
) -> list[Any]:
    """Judge checkpoints: intact, finite, known-good? Changes no file, takes no lock."""
    from healcore.tools.probe.checkpoint import judge
    from healcore.tools.probe.limited_process import probe_paths

    return probe_paths("checkpoint", judge, checkpoints, inputs)


def _validate(model: type[BaseModel], options: dict[str, Any], spec: Path | None) -> BaseModel:
    """Returns the inputs from the options, else the spec, else defaults. Exits if invalid."""
    options = {name: value for name, value in options.items() if value is not None}
    try:
        return model(**{**(read_spec(spec) if spec else {}), **options})
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # a rule for several inputs
            _fail(str(first.get("ctx", {}).get("error", first["msg"])))
        key = ".".join(map(str, first["loc"]))
        option = "--" + key.replace("_", "-") if key in options else f"{key} in {spec}"
        _fail(f"{option} is {first['input']!r}: {first['msg'].lower()}")
    except ProbeError as error:
        _fail(str(error))


def _finish(results: Sequence[ProbeResult], inputs: BaseModel, as_json: bool) -> NoReturn:
    from healcore.tools.probe.result import dumps, worst

    if as_json:
        echo_json(dumps(results, inputs))
    else:
        from healcore.tools.probe.text import show

        for result in results:
            show(result)
    raise typer.Exit(worst(result.verdict for result in results).exit_code)


def _fail(why: str) -> NoReturn:
    fail(f"healcore probe: {why}", NO_VERDICT)
