"""Options, parsers of options and the error exit of the commands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from healcore.core.errors import HealcoreError
from healcore.tools.output import echo

if TYPE_CHECKING:  # local imports, so that other commands start fast
    from healcore.policy import Policy

CANNOT_RUN = 2  # exit status

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A value to replace in the policy, for example clip.max_norm=1.0. Repeatable.",
    ),
]
ColumnOption = Annotated[
    list[str] | None,
    typer.Option(metavar="SIGNAL=NAME", help="Column of a signal: loss=train/ce. Repeatable."),
]
JoinOption = Annotated[
    bool, typer.Option("--join", help="All traces are attempts of one run, in this order.")
]


def load_policy(name: str, pairs: Iterable[str] | None = None) -> Policy:
    """Loads a policy with the `KEY=VALUE` pairs of `--set`. Raises PolicyError."""
    from healcore.policy import load
    from healcore.policy.loader import parse_overrides

    return load(name, **parse_overrides(pairs or (), "--set"))


def parse_columns(pairs: Iterable[str] | None) -> dict[str, str]:
    """Parses `SIGNAL=NAME` pairs to signal -> name of its column. Raises TraceError."""
    from healcore.tools.traces import TraceError

    columns = {}
    for pair in pairs or ():
        signal, _, name = pair.partition("=")
        if not (signal and name):
            raise TraceError(f"--column must be SIGNAL=NAME, like loss=train/ce, got {pair!r}")
        columns[signal] = name
    return columns


def fail(why: str, status: int = CANNOT_RUN) -> NoReturn:
    """Prints the reason on standard error and exits with the status."""
    echo(why, err=True)
    raise typer.Exit(status)


def reported(command: Callable[..., None]) -> Callable[..., None]:
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
