"""The command `healcore`: collects the subcommands and prepares standard output.

The exit status is a result (for example, 1 is WARN of `probe`). A standard output that is closed,
full or ASCII-only must not change the status. Click exits with 1 when the reader of a pipe ends.
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

# No rich tracebacks: the commands print healcore's errors as sentences, and Python prints others.
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


class _TolerantPipe(io.RawIOBase):
    """Standard output to a pipe. Discards output after the reader has ended (`| head`)."""

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
    """Context manager: makes standard output and error accept all output of a command.

    With `discard`, the command continues after the reader of a pipe has ended. If standard output
    cannot be written, prints the reason on standard error and raises SystemExit.
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
            io.BufferedWriter(_TolerantPipe(before.fileno())),
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
    """Discards the buffer, because Python's flush at exit would raise the error again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
