"""Cleans and prints all output of the commands: parts of it come from files of any origin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from healcore.core.printable import clean, clean_json

if TYPE_CHECKING:  # imported where it is used, so that the other commands start fast
    from rich.console import Console


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints a text of any origin, cleaned; `err`: to standard error."""
    typer.echo(clean(text), err=err, nl=nl)


def echo_json(text: str) -> None:
    """Prints a JSON document, cleaned."""
    typer.echo(clean_json(text))


def console(**options: Any) -> Console:
    """Rich's console, with text cleaned after layout: rich's own colours stay."""
    from rich.console import Console, ConsoleOptions, RenderHook, RenderResult
    from rich.control import Control
    from rich.segment import Segment

    class Cleaned:
        def __init__(self, printed: Any) -> None:
            self._printed = printed

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            for text, style, control in console.render(self._printed, options):
                yield Segment(text if control else clean(text), style, control)

    class Cleaning(RenderHook):
        def process_renderables(self, renderables: list[Any]) -> list[Any]:
            return [each if isinstance(each, Control) else Cleaned(each) for each in renderables]

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            """A reader that closes early (`| head`) is no error; rich would exit with status 1."""
            raise BrokenPipeError

    made = Piped(**options)
    made.push_render_hook(Cleaning())
    return made
