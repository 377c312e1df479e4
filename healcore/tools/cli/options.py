"""Options, parsers of options and the error exit of the commands."""

from __future__ import annotations

import functools
import json
import tomllib
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
    """Loads a policy with the `KEY=VALUE` pairs of `--set`. Raises PolicyError.

    A key is dotted. A value has the syntax of TOML, but a string needs no quotes.
    """
    from healcore.policy import PolicyError, Problem, load
    from healcore.policy.loader import merged

    overrides: dict[str, Any] = {}
    for pair in pairs or ():
        key, _, value = pair.partition("=")
        texts = (f"{key} = {value}", f"{key} = {json.dumps(value.strip())}")
        tables = [table for table in map(_parse_toml, texts) if table] if value else []
        if not tables:
            rule = "must be KEY=VALUE with a dotted key; rules can be changed only in a file"
            problem = Problem("--set", pair, rule, "--set clip.max_norm=1.0, --set mode=observe")
            raise PolicyError("on the command line", (problem,))
        overrides = merged(overrides, tables[0])
    return load(name, **overrides)


def _parse_toml(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except ValueError:
        return None


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
