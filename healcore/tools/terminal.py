"""Prints untrusted text, such as names from logs, with control sequences escaped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from healcore.core.printable import clean, clean_json

if TYPE_CHECKING:  # a local import, so that other commands start fast
    from rich.console import Console
    from rich.segment import Segment


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints untrusted text, with `err` on standard error, with `nl` followed by a newline."""
    typer.echo(clean(text), err=err, nl=nl)


def echo_json(text: str) -> None:
    """Prints an untrusted JSON document."""
    typer.echo(clean_json(text))


def console(**options: Any) -> Console:
    """Returns a rich console that escapes control sequences in text, but not rich's own."""
    from rich.console import Console

    class CleanConsole(Console):
        def render(self, *args: Any, **kwargs: Any) -> Iterator[Segment]:
            for segment in super().render(*args, **kwargs):
                text = segment.text if segment.control else clean(segment.text)
                yield segment._replace(text=text)

    return CleanConsole(**options)
