"""Text for a terminal, with the characters escaped that it would execute.

Names and messages may come from files that anybody may have written. A terminal executes escape
sequences in them, which set the window's title, hide a line, or write into the clipboard; an
override of the writing direction shows text in another order.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable


def clean(text: str, keep: str = "\n\t") -> str:
    r"""Escapes every character that is not printable, a space, or one of `keep`.

    Control characters (ESC, C1), direction overrides and invisible characters become `\x1b` or
    `\u202e`, as in TOML and Python. `keep` is "" for a name, which has one line.
    """
    return _cleaned(text, keep, _escaped)


def clean_json(text: str) -> str:
    """Escapes the same characters in a JSON document, whose content stays equal."""
    return _cleaned(text, "\n", lambda each: json.dumps(each)[1:-1])


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
