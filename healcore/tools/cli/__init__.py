"""The command `healcore`: collects the subcommands."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

import healcore
from healcore.tools.cli import demo, events, policy, probe, replay, report
from healcore.tools.cli.options import reported
from healcore.tools.output import echo

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
app.command("demo")(reported(demo.demo))
app.command("replay")(reported(replay.replay))
app.command("report")(reported(report.report))
app.command("sweep")(reported(replay.sweep))


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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may take only ASCII
            stream.reconfigure(errors="backslashreplace")
    app()
