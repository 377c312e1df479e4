"""The commands `healcore probe loss | optimizer | checkpoint`.

Exit status: 0 pass, 1 warn, 2 fail, 3 no verdict (too short, nothing to judge, unreadable, or an
invalid command line). For several results it is the first of FAIL, ERROR, WARN, SKIP, PASS.
"""

from __future__ import annotations

import contextlib
import inspect
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_args

import typer
from pydantic import BaseModel, ValidationError
from typer.core import TyperCommand, TyperGroup

from healcore.plugins.checkpoint_contents import ProbeError
from healcore.tools.cli.options import ColumnOption, JoinOption, fail, parse_columns
from healcore.tools.probe.inputs import CheckpointInputs, LossInputs, OptimizerInputs, read_spec
from healcore.tools.terminal import console, echo_json

if TYPE_CHECKING:  # local imports, so that other commands start fast
    from healcore.tools.probe.result import ProbeResult
    from healcore.tools.traces import Unreadable

NO_VERDICT = 3

_UsageError: Any = typer.BadParameter.__bases__[0]
"""Click's `UsageError`. From typer, because newer releases of typer include a copy of click."""


@contextlib.contextmanager
def _usage_errors_without_verdict() -> Iterator[None]:
    """Context manager: an invalid command line exits with 3, because click's 2 means FAIL here."""
    try:
        yield
    except _UsageError as error:
        error.exit_code = NO_VERDICT
        raise


class _UsageErrorStatus:
    """Mixin for typer's commands: an invalid command line exits with 3."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parses the command line, or for a group the part before the command."""
        with _usage_errors_without_verdict():
            return super().make_context(*args, **kwargs)  # type: ignore[misc]


class Command(_UsageErrorStatus, TyperCommand):
    """The command of one probe."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the probe. An unexpected error exits with 3, because Python's 1 means WARN here."""
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, _UsageError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.filename is None:
                raise  # from standard output, handled in `healcore.tools.cli.main`
            lines = str(error).strip().splitlines() or [""]
            _fail(f"no verdict: {type(error).__name__}: {lines[0][:200]}")


class Group(_UsageErrorStatus, TyperGroup):
    """The group of all probes."""

    def resolve_command(self, *args: Any, **kwargs: Any) -> Any:
        """Finds the probe."""
        with _usage_errors_without_verdict():
            return super().resolve_command(*args, **kwargs)


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Judge a loss curve, an optimizer state or a checkpoint. "
    "Exit status 0 pass, 1 warn, 2 fail, 3 no verdict.",
)

_Json = Annotated[bool, typer.Option("--json", help="JSON instead of text, without NaN or Inf.")]


def _add_command(model: type[BaseModel]) -> Callable[[Callable[..., None]], None]:
    """Decorator: adds a command to the app, with an option for each field of `model`."""
    fields = model.model_fields
    options = []
    for name, field in fields.items():
        if isinstance(field.default, dict):
            continue  # a table, only in a spec
        types = {field.annotation, *get_args(field.annotation)}
        help_, metavar = field.description or "", None
        kind: Any = next((known for known in (bool, int, float) if known in types), str)
        default: Any = False if kind is bool else None
        if isinstance(field.default, tuple):
            kind, metavar = list[str], "PATTERN"
        elif kind in (int, float) and field.default is not None:
            help_ += f" [{field.default:g}]"
        flag = f"--{name.replace('_', '-')}"
        annotation = Annotated[
            kind if kind is bool else kind | None,
            typer.Option(flag, metavar=metavar, help=help_),
        ]
        options.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
        )

    def add(command: Callable[..., None]) -> None:
        parameters = inspect.signature(command, eval_str=True).parameters

        def run(**arguments: Any) -> None:
            values = {name: arguments.pop(name) for name in fields if name in arguments}
            inputs = _validate(model, values, arguments.get("spec"))
            command(**arguments, inputs=inputs)

        run.__doc__ = command.__doc__
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                *(p.replace(kind=p.KEYWORD_ONLY) for p in parameters.values()
                  if p.name not in ("inputs", "as_json")),
                *options,
                parameters["as_json"].replace(kind=inspect.Parameter.KEYWORD_ONLY),
            ]
        )  # fmt: skip
        app.command(command.__name__, cls=Command)(run)

    return add


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
    as_json: _Json = False,
) -> None:
    """Judge a loss curve: does it fall, does it stay low, does it end well?"""
    del spec  # `inputs` has its values
    from healcore.tools.probe.loss import probe_loss
    from healcore.tools.traces import TraceError, open_traces

    try:
        opened, failed = open_traces(traces, columns=parse_columns(column), join=join)
    except TraceError as error:
        _fail(str(error))
    results = probe_each("loss", opened, probe_loss, inputs, name=lambda trace: trace.name)
    _finish([*_results_of_unreadable(failed, traces), *results], inputs, as_json)


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
    as_json: _Json = False,
) -> None:
    """Judge the state of Adam or a similar optimizer: are its second moments healthy?"""
    from healcore.tools.probe.optimizer import probe_optimizer

    _finish(probe_each("optimizer", checkpoints, probe_optimizer, inputs), inputs, as_json)


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
    as_json: _Json = False,
) -> None:
    """Judge checkpoints: intact, finite, known-good? Changes no file, takes no lock."""
    from healcore.tools.probe.checkpoint import probe_checkpoint

    _finish(probe_each("checkpoint", checkpoints, probe_checkpoint, inputs), inputs, as_json)


def probe_each(
    probe: str,
    subjects: Iterable[Any],
    judge: Callable[[Any, Any], ProbeResult],
    inputs: BaseModel,
    name: Callable[[Any], str] = str,
) -> list[ProbeResult]:
    """Probes each subject (a path or a trace). An unreadable subject gets a result too."""
    from healcore.extras import MissingExtraError
    from healcore.tools.probe import limited_process
    from healcore.tools.probe.result import unexpected, unreadable
    from healcore.tools.traces import TraceError

    results = []
    for subject in subjects:
        try:
            results.append(judge(subject, inputs))
        except (ProbeError, TraceError, MissingExtraError) as error:
            results.append(unreadable(probe, name(subject), error))
        except OSError as error:
            problem = ProbeError(f"{name(subject)} cannot be read: {error.strerror or error}")
            results.append(unreadable(probe, name(subject), problem))
        except Exception as error:
            results.append(unexpected(probe, name(subject), error))
    limited_process.close()
    return results


def _results_of_unreadable(failed: Sequence[Unreadable], paths: Sequence[str]) -> list[ProbeResult]:
    """Returns results for paths that are not traces, one for all files of a checkpoint store."""
    if not failed:
        return []
    from healcore.tools.probe.checkpoint import is_store
    from healcore.tools.probe.result import unreadable

    results: dict[tuple[str, str], ProbeResult] = {}
    stores = {path for path in paths if is_store(Path(path))}
    for failure in failed:
        file, problem = Path(failure.path), failure.problem
        store = next((store for store in stores if Path(store) in (file, *file.parents)), None)
        if store is not None:
            command = f"healcore probe checkpoint {shlex.quote(store)}"
            problem = f"{store} is a checkpoint store, not a log of a run: run {command}"
        subject = store or failure.path
        results.setdefault((subject, problem), unreadable("loss", subject, ProbeError(problem)))
    return list(results.values())


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

        show(results, console())
    raise typer.Exit(worst(result.verdict for result in results).exit_code)


def _fail(why: str) -> NoReturn:
    fail(f"healcore probe: {why}", NO_VERDICT)
