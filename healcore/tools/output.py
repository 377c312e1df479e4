"""Output of the commands: escaped text, errors as sentences, files whole or not at all."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from healcore.core.errors import HealcoreError, clean

if TYPE_CHECKING:  # imported in `console`, so that other commands start fast
    from rich.console import Console
    from rich.segment import Segment

AnyPath = str | os.PathLike[str]
CANNOT_RUN = 2
"""Exit status of a command that could not do its work."""


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints text of which a part may come from a file that somebody else wrote.

    A log or an event may contain control sequences, which would move the cursor of the terminal or
    change its title. They are printed as escapes.

    Args:
        text: one line or several. Newlines are printed as they are.
        err: print on standard error instead of standard output.
        nl: print a newline after the text.
    """
    typer.echo(clean(text), err=err, nl=nl)


def console(**options: Any) -> Console:
    """Builds a rich console that escapes control sequences in text, but not rich's own.

    Args:
        **options: arguments of `rich.console.Console`.

    Returns:
        The console. Text from a file cannot control the terminal, see `echo`.
    """
    from rich.console import Console

    class CleanConsole(Console):
        def render(self, *args: Any, **kwargs: Any) -> Iterator[Segment]:
            for segment in super().render(*args, **kwargs):
                if not segment.control:
                    segment = segment._replace(text=clean(segment.text))
                yield segment

    return CleanConsole(**options)


def fail(why: str) -> NoReturn:
    """Prints the reason on standard error and exits with `CANNOT_RUN`.

    Args:
        why: one or more sentences with the rule, the value and the remedy.

    Raises:
        typer.Exit: always.
    """
    echo(why, err=True)
    raise typer.Exit(CANNOT_RUN)


def report_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: prints an error of healcore or of the system as a sentence, and exits with 2.

    Any other exception is a bug of healcore and keeps its traceback.

    Args:
        command: a function that typer calls with its options as keywords.

    Returns:
        The same command, with the signature and the docstring that typer reads.
    """

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
    """An output cannot be written. The message has the reason and the remedy.

    `check_outputs` raises it before the work starts, `write_output` after it.
    """


def check_outputs(outputs: Iterable[AnyPath], inputs: Iterable[AnyPath]) -> None:
    """Checks that every output can be written and overwrites no input, before the work starts.

    Without this check, a replay of an hour could end with an error at its last line, or a mistyped
    option could replace the log of a run.

    Args:
        outputs: paths of files to write.
        inputs: paths of files and folders that are read. All files in such a folder are inputs,
            except pages (`*.html`).

    Raises:
        OutputError: an output is a folder or an input, or its folder does not exist.
    """
    input_paths = [Path(path) for path in inputs]
    for path in map(Path, outputs):
        if not path.absolute().parent.is_dir():
            raise OutputError(f"{path} cannot be written: the folder {path.parent} does not exist")
        if path.is_dir():
            raise OutputError(f"{path} is a folder: name a file in the folder")
        real = path.resolve()
        replaces_file = path.is_file() and path.suffix != ".html"
        for input_path in input_paths:
            real_input = input_path.resolve()
            if real == real_input or (replaces_file and real.is_relative_to(real_input)):
                raise OutputError(f"{path} is an input: write to another file")


def write_output(path: AnyPath, text: str) -> None:
    """Writes a text as UTF-8: the whole file or nothing.

    A device or a pipe is written directly. A link is replaced, because another user may have
    created it.

    Args:
        path: the file, for example `out.html` or `/dev/stdout`.
        text: the content. Characters without a UTF-8 form are written as escapes.

    Raises:
        OutputError: `path` cannot be written.
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
