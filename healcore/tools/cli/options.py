"""Options, the progress bar and the error exit that several commands share."""

from __future__ import annotations

import contextlib
import json
import tomllib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from healcore.tools.terminal import console, echo

if TYPE_CHECKING:  # imported where it is used, so that the other commands start fast
    from rich.progress import Progress

UNUSABLE = 2
"""Exit status of a command that cannot run."""

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A value to replace in the policy, as in clip.max_norm=1.0. Repeat it for more.",
    ),
]
Column = Annotated[
    list[str] | None,
    typer.Option(metavar="SIGNAL=NAME", help="Which column is which, as in loss=train/ce."),
]
Join = Annotated[
    bool, typer.Option("--join", help="All traces are attempts of one run, in this order.")
]


def overrides_of(pairs: Iterable[str] | None) -> dict[str, Any]:
    """The keywords for `healcore.policy.load` from `KEY=VALUE` pairs; raises PolicyError.

    A key is dotted; a value is written as in TOML, but a string needs no quotes.
    """
    from healcore.policy.errors import PolicyError, Problem
    from healcore.policy.loader import merged

    found: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        texts = (f"{key} = {value}", f"{key} = {json.dumps(value.strip())}")
        tables = [table for table in map(_parsed, texts) if table] if equals and value else []
        if not tables:
            rule = "KEY=VALUE with the dotted key of a value; rules are changed in a file"
            problem = Problem("--set", pair, rule, "--set clip.max_norm=1.0, --set mode=observe")
            raise PolicyError("on the command line", (problem,))
        found = merged(found, tables[0])
    return found


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except ValueError:
        return None


def columns_of(pairs: Iterable[str] | None) -> dict[str, str]:
    """Signal -> the name of its column, from `SIGNAL=NAME` pairs; TraceError for other texts."""
    from healcore.tools.traces import TraceError

    columns = {}
    for pair in pairs or ():
        signal, equals, name = pair.partition("=")
        if not (signal and equals and name):
            raise TraceError(f"--column must be SIGNAL=NAME, as in loss=train/ce, got {pair!r}")
        columns[signal] = name
    return columns


def fail(why: str, status: int = UNUSABLE) -> NoReturn:
    """Prints on standard error why the command cannot run, and exits."""
    echo(why, err=True)
    raise typer.Exit(status)


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress bar on standard error, shown only in a terminal."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )  # fmt: skip

    printer = console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=printer,
        transient=True,
        disable=not printer.is_terminal,
    ) as bar:
        yield bar
