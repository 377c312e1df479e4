"""The command `healcore`. Its policy commands need neither JAX nor torch.

An exit status means something here (`probe` reports WARN with 1), so nothing that happens to
standard output may change it: it may be closed, full, or know only ASCII. Click gives 1 to a pipe
whose reader has seen enough.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

import healcore
from healcore.tools.cli import demo, events, policy, probe, replay, report, sweep
from healcore.tools.terminal import echo

__all__ = ["app", "main"]

# No rich tracebacks: an error of ours is printed as a sentence, any other as Python's own.
app = typer.Typer(
    name="healcore",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="One policy that heals training runs, the same in JAX and in torch.",
)
app.add_typer(policy.app, name="policy")
app.add_typer(events.app, name="events")
app.add_typer(probe.app, name="probe")
app.command("demo")(demo.demo)
app.command("replay")(replay.replay)
app.command("report")(report.report)
app.command("sweep")(sweep.sweep)
app.command("watch")(events.watch)


def _print_version(wanted: bool) -> None:
    if wanted:
        echo(f"healcore {healcore.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    del version


def main() -> None:
    """Entry point of the console script."""
    with _prepared_output(discard=sys.argv[1:2] != ["replay"]):
        app()


class _UnreadPipe(io.RawIOBase):
    """Standard output whose reader may leave (`| head`): the rest is discarded."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._handle

    def isatty(self) -> bool:
        return os.isatty(self._handle)

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        try:
            return os.write(self._handle, view)
        except BrokenPipeError:
            return view.nbytes


@contextlib.contextmanager
def _prepared_output(*, discard: bool) -> Iterator[None]:
    """Makes standard output and error fit for anything that a command prints.

    Args:
        discard: go on when the reader has left; without it the command ends there.

    Raises:
        SystemExit: standard output could not be written; with the status of a command line that
            could not be carried out, after a line on standard error.
    """
    if sys.stdout is None:  # closed by the caller: `>&-`
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    before = sys.stdout
    if discard and isinstance(before, io.TextIOWrapper) and _is_pipe(before):
        before.flush()
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_UnreadPipe(before.fileno())),
            encoding=before.encoding,
            errors="backslashreplace",
        )
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_buffer()
        raise
    except OSError as error:
        if error.filename is None and isinstance(sys.stdout, io.TextIOWrapper):
            _discard_buffer()
            why = error.strerror or error
            echo(f"standard output cannot be written: {why}", err=True)
            raise SystemExit(3 if "probe" in sys.argv[1:2] else 2) from None
        raise


def _is_pipe(stream: io.TextIOWrapper) -> bool:
    try:
        return not os.isatty(stream.fileno())
    except (OSError, ValueError):
        return False


def _discard_buffer() -> None:
    """Discards what is in the buffer; Python would report the error again at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
