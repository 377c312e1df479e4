"""Escapes the characters that a terminal would execute or hide.

Names and messages may come from untrusted files. A terminal executes the escape sequences in them:
they set the window's title, hide a line or write to the clipboard. A direction override shows the
text in another order.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable


def clean(text: str, keep: str = "\n\t") -> str:
    r"""Escapes all characters except printable ones, spaces and those in `keep`.

    Control characters (ESC, C1), direction overrides and invisible characters become `\x1b` or
    `\u202e`, as in TOML and Python. Pass `keep=""` for names, which have one line.
    """
    return _clean(text, keep, _escape)


def clean_json(text: str) -> str:
    """Escapes the same characters in a JSON document without changing its content."""
    return _clean(text, "\n", lambda each: json.dumps(each)[1:-1])


def _clean(text: str, keep: str, escape: Callable[[str], str]) -> str:
    if text.isascii() and text.isprintable():
        return text
    spaces = {char for char in text if unicodedata.category(char) == "Zs"}
    return "".join(
        char if char.isprintable() or char in spaces or char in keep else escape(char)
        for char in text
    )


def _escape(char: str) -> str:
    code = ord(char)
    if code < 0x80:  # includes \t and \n
        return char.encode("unicode_escape").decode()
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
