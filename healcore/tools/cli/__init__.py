"""The command `healcore`: collects the subcommands, and defines `healcore demo`.

Exit status of the demo: 0 the runs ended, 2 the demo could not run.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

import healcore
from healcore.tools.cli import events, policy, probe, replay
from healcore.tools.output import echo, report_errors

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


@app.command()
@report_errors
def demo(
    framework: Annotated[
        Literal["torch", "jax", "both"], typer.Option(help="Framework of the runs.")
    ] = "both",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="New folder for the runs. Default: healcore-demo, or healcore-demo-2, ... if it "
            "exists.",
        ),
    ] = None,
) -> None:
    """Train the same faulty run only watched and healed, in torch and in JAX."""
    from healcore.tools.demo import run_demo

    frameworks: tuple[str, ...] = (framework,)
    if framework == "both":
        frameworks = ("torch", "jax")
    run_demo(out or _new_folder("healcore-demo"), frameworks)


def _new_folder(name: str) -> Path:
    """A path in the current directory that does not exist: the name, or the name with a number."""
    path = Path(name)
    number = 1
    while path.exists():
        number += 1
        path = Path(f"{name}-{number}")
    return path


app.command("replay")(report_errors(replay.replay_command))
app.command()(report_errors(events.report))
app.command()(report_errors(replay.sweep))


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
    """Entry point of the console script `healcore`, and of `python -m healcore`.

    Characters that the terminal cannot show are printed as escapes. Otherwise a terminal that takes
    only ASCII would end the command with a UnicodeEncodeError.

    Raises:
        SystemExit: always, with the exit status of the command.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app()
