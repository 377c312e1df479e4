"""Output of the commands: escaped text, errors as sentences, files whole or not at all."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from healcore.core.errors import HealcoreError, clean

if TYPE_CHECKING:  # a local import, so that other commands start fast
    from rich.console import Console
    from rich.segment import Segment

AnyPath = str | os.PathLike[str]
CANNOT_RUN = 2  # exit status


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints untrusted text, with `err` on standard error, with `nl` followed by a newline."""
    typer.echo(clean(text), err=err, nl=nl)


def console(**options: Any) -> Console:
    """A rich console that escapes control sequences in text, but not rich's own."""
    from rich.console import Console

    class CleanConsole(Console):
        def render(self, *args: Any, **kwargs: Any) -> Iterator[Segment]:
            for segment in super().render(*args, **kwargs):
                text = segment.text if segment.control else clean(segment.text)
                yield segment._replace(text=text)

    return CleanConsole(**options)


def fail(why: str) -> NoReturn:
    """Prints the reason on standard error and exits with `CANNOT_RUN`."""
    echo(why, err=True)
    raise typer.Exit(CANNOT_RUN)


def report_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: prints an error of healcore or of the system as a sentence, and exits with 2."""

    @functools.wraps(command)
    def run(**options: Any) -> None:
        try:
            command(**options)
        except BrokenPipeError:  # `| head`: click ends the program without a message
            raise
        except (HealcoreError, OSError) as error:
            fail(str(error))

    return run


class OutputError(HealcoreError, ValueError):
    """An output cannot be written. The message has the reason and the remedy."""


def check_outputs(outputs: Iterable[AnyPath], inputs: Iterable[AnyPath]) -> None:
    """Checks that every output can be written and overwrites no input, before the work starts.

    Raises OutputError if an output is a folder or an input, or if its folder does not exist. All
    files in a folder that is an input are inputs, except pages.
    """
    folders = list(map(Path, inputs))
    for path in map(Path, outputs):
        if not path.absolute().parent.is_dir():
            raise OutputError(f"{path} cannot be written: the folder {path.parent} does not exist")
        if path.is_dir():
            raise OutputError(f"{path} is a folder: name a file in the folder")
        real = path.resolve()
        written = path.is_file() and path.suffix != ".html"
        for each in map(Path.resolve, folders):
            if real == each or (written and real.is_relative_to(each)):
                raise OutputError(f"{path} is an input: write to another file")


def write_output(path: AnyPath, text: str) -> None:
    """Writes a text as UTF-8: the whole file or nothing.

    A device or a pipe is written directly. A link is replaced, because another user may have
    created it. Raises OutputError if `path` cannot be written.
    """
    from healcore.runtime.store import files

    target = Path(path)
    data = text.encode("utf-8", "backslashreplace")
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
        else:
            files.replace(target, data)
    except OSError as error:
        why = error.strerror or error
        raise OutputError(f"{target} cannot be written: {why}; name another file") from error
