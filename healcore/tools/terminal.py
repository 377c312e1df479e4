"""Prints untrusted text, such as names from logs, with control sequences escaped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from healcore.core.printable import clean, clean_json

if TYPE_CHECKING:  # a local import, so that other commands start fast
    from rich.console import Console


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints untrusted text, with `err` on standard error, with `nl` followed by a newline."""
    typer.echo(clean(text), err=err, nl=nl)


def echo_json(text: str) -> None:
    """Prints an untrusted JSON document."""
    typer.echo(clean_json(text))


def console(**options: Any) -> Console:
    """Returns a rich console that escapes control sequences in text, but not rich's own."""
    from rich.console import Console, ConsoleOptions, RenderHook, RenderResult
    from rich.control import Control
    from rich.segment import Segment

    class CleanText:
        def __init__(self, renderable: Any) -> None:
            self._renderable = renderable

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            for text, style, control in console.render(self._renderable, options):
                yield Segment(text if control else clean(text), style, control)

    class CleanTextHook(RenderHook):
        def process_renderables(self, renderables: list[Any]) -> list[Any]:
            return [r if isinstance(r, Control) else CleanText(r) for r in renderables]

    cleaning = Console(**options)
    cleaning.push_render_hook(CleanTextHook())
    return cleaning
