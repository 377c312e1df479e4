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
    return _cleaned(text, keep, _escaped)


def clean_json(text: str) -> str:
    """Escapes the same characters in a JSON document without changing its content."""
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
