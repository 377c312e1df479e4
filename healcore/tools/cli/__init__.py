"""The command `healcore`. Its policy commands need neither JAX nor torch."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import healcore
from healcore.tools.cli import demo, events, policy, probe, replay, report, sweep, watch
from healcore.tools.cli.standard_output import prepared

__all__ = ["app", "main"]

# No rich tracebacks: an error of ours is printed in words, any other with Python's own.
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
demo.add_to(app)
replay.add_to(app)
report.add_to(app)
sweep.add_to(app)
watch.add_to(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"healcore {healcore.__version__}")
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
    with prepared(patient=sys.argv[1:2] != ["replay"]):
        app()
