"""The commands `healcore probe loss | optimizer | checkpoint`.

Exit status: 0 pass, 1 warn, 2 fail, 3 no verdict (too short, nothing to judge, unreadable, or the
command line is wrong). Of several results the first of FAIL, ERROR, WARN, SKIP, PASS decides.
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
from healcore.tools.cli.options import Column, Join, columns_of, fail
from healcore.tools.probe.inputs import CheckpointInputs, LossInputs, OptimizerInputs, read_spec
from healcore.tools.terminal import console, echo_json

if TYPE_CHECKING:  # imported where they are used, so that the other commands start fast
    from healcore.tools.probe.result import ProbeResult
    from healcore.tools.traces import Unreadable

NO_VERDICT = 3

_UsageError: Any = typer.BadParameter.__bases__[0]
"""Click's class, by way of typer: newer releases of typer include their own copy of click."""


@contextlib.contextmanager
def _no_verdict() -> Iterator[None]:
    """Makes a wrong command line exit with 3: click exits with 2, which means FAIL here."""
    try:
        yield
    except _UsageError as error:
        error.exit_code = NO_VERDICT
        raise


class _Parsed:
    """A mixin of typer's classes: a wrong command line exits with 3."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parses the command line, or for a group the part before the name of the command."""
        with _no_verdict():
            return super().make_context(*args, **kwargs)  # type: ignore[misc]


class Command(_Parsed, TyperCommand):
    """The command of one probe."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the probe; an unexpected error exits with 3, as Python's own status 1 is WARN."""
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, _UsageError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.filename is None:
                raise  # an error of standard output, see `healcore.tools.cli.main`
            lines = str(error).strip().splitlines() or [""]
            _unusable(f"it could not be judged: {type(error).__name__}: {lines[0][:200]}")


class Group(_Parsed, TyperGroup):
    """The group of all probes."""

    def resolve_command(self, *args: Any, **kwargs: Any) -> Any:
        """Finds the probe."""
        with _no_verdict():
            return super().resolve_command(*args, **kwargs)


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Is this curve, this optimizer state, this checkpoint healthy? "
    "Exit status 0 pass, 1 warn, 2 fail, 3 no verdict.",
)

_Json = Annotated[bool, typer.Option("--json", help="JSON instead of text; no NaN, no Infinity.")]


def _with_options(model: type[BaseModel]) -> Callable[[Callable[..., None]], None]:
    """A decorator that adds a command to the app, with an option for each field of `inputs`."""
    fields = model.model_fields
    options = []
    for name, field in fields.items():
        if isinstance(field.default, dict):
            continue  # a table, which a spec has
        kinds = {field.annotation, *get_args(field.annotation)}
        help_, metavar = field.description or "", None
        kind: Any = next((each for each in (bool, int, float) if each in kinds), str)
        default: Any = False if kind is bool else None
        if isinstance(field.default, tuple):
            kind, metavar = list[str], "PATTERN"
        elif kind in (int, float) and field.default is not None:
            help_ += f" [{field.default:g}]"
        flag = f"--{name.replace('_', '-')}"
        annotation = Annotated[
            kind if kind is bool else kind | None, typer.Option(flag, metavar=metavar, help=help_)
        ]
        options.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
        )

    def add(command: Callable[..., None]) -> None:
        own = inspect.signature(command, eval_str=True).parameters

        def run(**given: Any) -> None:
            values = {name: given.pop(name) for name in fields if name in given}
            command(**given, inputs=_checked(model, values, given.get("spec")))

        run.__doc__ = command.__doc__
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                *(each.replace(kind=each.KEYWORD_ONLY) for each in own.values()
                  if each.name not in ("inputs", "as_json")),
                *options,
                own["as_json"].replace(kind=inspect.Parameter.KEYWORD_ONLY),
            ]
        )  # fmt: skip
        app.command(command.__name__, cls=Command)(run)

    return add


@_with_options(LossInputs)
def loss(
    traces: Annotated[
        list[str],
        typer.Argument(metavar="TRACE", help="Logs of runs, of any kind that replay reads."),
    ],
    inputs: LossInputs,
    column: Column = None,
    join: Join = False,
    spec: Annotated[
        Path | None,
        typer.Option(
            "--spec",
            metavar="FILE",
            help="TOML with the options below as keys, and the score's [weights].",
        ),
    ] = None,
    as_json: _Json = False,
) -> None:
    """The loss curve: does it fall, does it hold, does it end well?"""
    del spec  # its keys are in `inputs`
    from healcore.tools.probe.loss import probe_loss
    from healcore.tools.traces import TraceError, open_traces

    try:
        opened, failed = open_traces(traces, columns=columns_of(column), join=join)
    except TraceError as error:
        _unusable(str(error))
    results = probe_each("loss", opened, probe_loss, inputs, name=lambda trace: trace.name)
    _finish([*_no_traces(failed, traces), *results], inputs, as_json)


@_with_options(OptimizerInputs)
def optimizer(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(
            metavar="CHECKPOINT",
            help="torch or safetensors files; directories of DCP, Orbax, the Trainer, or a store.",
        ),
    ],
    inputs: OptimizerInputs,
    as_json: _Json = False,
) -> None:
    """The state of Adam, AdamW and their like: are its second moments healthy?"""
    from healcore.tools.probe.optimizer import probe_optimizer

    _finish(probe_each("optimizer", checkpoints, probe_optimizer, inputs), inputs, as_json)


@_with_options(CheckpointInputs)
def checkpoint(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(
            metavar="CHECKPOINT",
            help="Stores, single checkpoints of a store, or checkpoints that others wrote.",
        ),
    ],
    inputs: CheckpointInputs,
    as_json: _Json = False,
) -> None:
    """Checkpoints: intact, finite, known-good? Nothing is changed, no lock is taken."""
    from healcore.tools.probe.checkpoint import probe_checkpoint

    _finish(probe_each("checkpoint", checkpoints, probe_checkpoint, inputs), inputs, as_json)


def probe_each(
    probe: str,
    subjects: Iterable[Any],
    judge: Callable[[Any, Any], ProbeResult],
    inputs: BaseModel,
    name: Callable[[Any], str] = str,
) -> list[ProbeResult]:
    """Probes each path or trace; one that cannot be read gives a result too."""
    from healcore.extras import MissingExtraError
    from healcore.tools.probe import limited_process
    from healcore.tools.probe.result import unexpected, unreadable
    from healcore.tools.traces import TraceError

    results = []
    for each in subjects:
        try:
            results.append(judge(each, inputs))
        except (ProbeError, TraceError, MissingExtraError) as error:
            results.append(unreadable(probe, name(each), error))
        except OSError as error:
            problem = ProbeError(f"{name(each)} cannot be read: {error.strerror or error}")
            results.append(unreadable(probe, name(each), problem))
        except Exception as error:
            results.append(unexpected(probe, name(each), error))
    limited_process.close()
    return results


def _no_traces(failed: Sequence[Unreadable], paths: Sequence[str]) -> list[ProbeResult]:
    """Results for paths that are no traces; all files of a checkpoint store give one result."""
    if not failed:
        return []
    from healcore.tools.probe.checkpoint import is_store
    from healcore.tools.probe.result import unreadable

    results: dict[tuple[str, str], ProbeResult] = {}
    stores = {path for path in paths if is_store(Path(path))}
    for bad in failed:
        at = Path(bad.path)
        store = next((each for each in stores if Path(each) in (at, *at.parents)), None)
        problem = bad.problem
        if store is not None:
            command = f"healcore probe checkpoint {shlex.quote(store)}"
            problem = f"{store} is a checkpoint store and holds no log of a run: {command}"
        where = store or bad.path
        results.setdefault((where, problem), unreadable("loss", where, ProbeError(problem)))
    return list(results.values())


def _checked(model: type[BaseModel], options: dict[str, Any], spec: Path | None) -> BaseModel:
    """The inputs from the options, then the spec, then defaults; exits if they are not valid."""
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return model(**{**(read_spec(spec) if spec else {}), **given})
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # of several inputs together
            _unusable(str(first.get("ctx", {}).get("error", first["msg"])))
        key = ".".join(map(str, first["loc"]))
        option = "--" + key.replace("_", "-") if key in given else f"{key} in {spec}"
        _unusable(f"{option} is {first['input']!r}: {first['msg'].lower()}")
    except ProbeError as error:
        _unusable(str(error))


def _finish(results: Sequence[ProbeResult], inputs: BaseModel, as_json: bool) -> NoReturn:
    from healcore.tools.probe.result import dumps, worst

    if as_json:
        echo_json(dumps(results, inputs))
    else:
        from healcore.tools.probe.text import show

        show(results, console())
    raise typer.Exit(worst(result.verdict for result in results).exit_code)


def _unusable(why: str) -> NoReturn:
    fail(f"healcore probe: {why}", NO_VERDICT)
