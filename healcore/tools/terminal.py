"""Everything that the commands print goes through here, and is cleaned.

Names, messages and policies come from files that anybody may have written, and a terminal executes
what is in them: an escape sequence sets the title of the window, hides a line, or writes into the
clipboard; an override of the direction of writing shows text in another order.
"""

from __future__ import annotations

import json
import unicodedata
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:  # imported where it is used, so that the other commands start fast
    from rich.console import Console


def clean(text: str, keep: str = "\n\t") -> str:
    r"""The text with every character escaped that is no letter, mark or space.

    Control characters (ESC, and those of C1 that do the same), overrides of the direction, and
    other invisible characters become `\x1b` or `\u202e`, as TOML and Python write them.

    Args:
        text: of any origin.
        keep: characters that stay; none in a name, which is in one line.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(each if _harmless(each) or each in keep else _escaped(each) for each in text)


def clean_json(text: str) -> str:
    """The same for a JSON document, which keeps its content."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        each if _harmless(each) or each == "\n" else json.dumps(each)[1:-1] for each in text
    )


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints a text of any origin, cleaned; `err`: to standard error."""
    typer.echo(clean(text), err=err, nl=nl)


def echo_json(text: str) -> None:
    """Prints a JSON document."""
    typer.echo(clean_json(text))


def console(kind: type[Console] | None = None, **options: Any) -> Console:
    """Rich's console, whose text is cleaned after it is laid out; its own colours stay.

    Args:
        kind: a class of consoles; rich's own if None.
        **options: its arguments.
    """
    from rich.console import Console, ConsoleOptions, RenderHook, RenderResult
    from rich.control import Control
    from rich.segment import Segment

    class Cleaned:
        """A renderable with its text cleaned."""

        def __init__(self, printed: Any) -> None:
            self._printed = printed

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            for text, style, control in console.render(self._printed, options):
                yield Segment(text if control else clean(text), style, control)

    class Cleaning(RenderHook):
        """Wraps every renderable in `Cleaned`."""

        def process_renderables(self, renderables: list[Any]) -> list[Any]:
            return [each if isinstance(each, Control) else Cleaned(each) for each in renderables]

    made = (kind or Console)(**options)
    made.push_render_hook(Cleaning())
    return made


def _harmless(each: str) -> bool:
    return each.isprintable() or unicodedata.category(each) == "Zs"


def _escaped(each: str) -> str:
    code = ord(each)
    if code < 0x80:  # a tab and the end of a line are \t and \n
        return each.encode("unicode_escape").decode()
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
