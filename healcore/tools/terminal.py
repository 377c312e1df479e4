"""Cleans and prints all output of the commands.

Names, messages and policies come from files that anybody may have written. A terminal executes
escape sequences in them, which set the window's title, hide a line, or write into the clipboard; an
override of the writing direction shows text in another order.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:  # imported where it is used, so that the other commands start fast
    from rich.console import Console


def clean(text: str, keep: str = "\n\t") -> str:
    r"""Escapes every character that is not printable, a space, or one of `keep`.

    Control characters (ESC, C1), direction overrides and invisible characters become `\x1b` or
    `\u202e`, as in TOML and Python. `keep` is "" for a name, which has one line.
    """
    return _cleaned(text, keep, _escaped)


def clean_json(text: str) -> str:
    """Escapes the same characters in a JSON document, whose content stays equal."""
    return _cleaned(text, "\n", lambda each: json.dumps(each)[1:-1])


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


def _cleaned(text: str, keep: str, escape: Callable[[str], str]) -> str:
    if text.isascii() and text.isprintable():
        return text
    spaces = {each for each in text if unicodedata.category(each) == "Zs"}
    return "".join(
        each if each.isprintable() or each in spaces or each in keep else escape(each)
        for each in text
    )


def _escaped(each: str) -> str:
    code = ord(each)
    if code < 0x80:  # includes \t and \n
        return each.encode("unicode_escape").decode()
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
