"""What the probes share on the command line: options checked, errors told, one exit status."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from healcore.tools.terminal import console, say, say_json

if TYPE_CHECKING:  # imported where they are used, so that the other commands start fast
    from pydantic import BaseModel

    from healcore.tools.probe.verdict import Result
    from healcore.tools.traces import Unreadable

CANNOT_SAY = 3

_UsageError: Any = typer.BadParameter.__bases__[0]
"""click's; newer releases of typer carry a click of their own."""

Inputs = TypeVar("Inputs", bound="BaseModel")


@contextlib.contextmanager
def _no_verdict() -> Iterator[None]:
    """A wrong command line must not look like a verdict: click's own status for it is 2."""
    try:
        yield
    except _UsageError as error:
        error.exit_code = CANNOT_SAY
        raise


class Command(TyperCommand):
    """A probe."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parses the command line."""
        with _no_verdict():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Runs it. Python's own status for an error that nobody had thought of is that of WARN."""
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, _UsageError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.filename is None:
                raise  # standard output, see `standard_output`
            lines = str(error).strip().splitlines() or [""]
            unusable(f"it could not be judged: {type(error).__name__}: {lines[0][:200]}")


class Group(TyperGroup):
    """All of them."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parses what stands before the name of the probe."""
        with _no_verdict():
            return super().make_context(*args, **kwargs)

    def resolve_command(self, *args: Any, **kwargs: Any) -> Any:
        """Finds the probe."""
        with _no_verdict():
            return super().resolve_command(*args, **kwargs)


def each(
    probe: str,
    paths: Sequence[Path],
    judge: Callable[[Path, Any], Result],
    inputs: BaseModel,
) -> list[Result]:
    """Probes paths one by one; what cannot be read is a result too."""
    from healcore.extras import MissingExtraError
    from healcore.tools.probe.verdict import ProbeError, unforeseen, unreadable

    results = []
    for path in paths:
        try:
            results.append(judge(path, inputs))
        except (ProbeError, MissingExtraError) as error:
            results.append(unreadable(probe, str(path), error))
        except OSError as error:
            told = ProbeError(f"{path} cannot be read: {error.strerror or error}")
            results.append(unreadable(probe, str(path), told))
        except Exception as error:
            results.append(unforeseen(probe, str(path), error))
    return results


def no_traces(failed: Sequence[Unreadable], paths: Sequence[str]) -> list[Result]:
    """What could not be read as a trace; of a checkpoint store that, and not each file in it."""
    from healcore.tools.probe.verdict import ProbeError, unreadable

    told: dict[tuple[str, str], Result] = {}
    stores = {path for path in paths if failed and _is_store(path)}
    for bad in failed:
        at = Path(bad.path)
        store = next((each for each in stores if Path(each) in (at, *at.parents)), None)
        problem = bad.problem
        if store is not None:
            command = f"healcore probe checkpoint {shlex.quote(store)}"
            problem = f"{store} is a checkpoint store and holds no log of a run: {command}"
        where = store or bad.path
        told.setdefault((where, problem), unreadable("loss", where, ProbeError(problem)))
    return list(told.values())


def _is_store(path: str) -> bool:
    from healcore.tools.probe.checkpoint.stored import is_store

    return is_store(Path(path))


def checked(model: type[Inputs], given: Mapping[str, Any]) -> Inputs:
    """The inputs; what was not given has its default."""
    from pydantic import ValidationError

    from healcore.tools.probe.verdict import ProbeError

    try:
        return model(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        option = "--" + str(first["loc"][0]).replace("_", "-") if first["loc"] else "the options"
        unusable(f"{option} is {first['input']!r}: {first['msg'].lower()}")
    except ProbeError as error:
        unusable(str(error))


def finish(results: Sequence[Result], inputs: BaseModel, as_json: bool) -> NoReturn:
    """Prints results and exits."""
    from healcore.tools.probe.document import dumps
    from healcore.tools.probe.verdict import worst

    if as_json:
        say_json(dumps(results, inputs))
    else:
        from healcore.tools.probe.text import show

        show(results, console())
    raise typer.Exit(worst(result.verdict for result in results).exit_code)


def unusable(told: str) -> NoReturn:
    """Says what is wrong with the command line and exits."""
    say(f"healcore probe: {told}", err=True)
    raise typer.Exit(CANNOT_SAY)
