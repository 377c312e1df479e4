"""Base class of all exceptions that healcore raises, the errors of its adapters, and their texts.

Messages may quote names from untrusted files, whose escape sequences a terminal would execute: they
set the window's title, hide a line or write to the clipboard. A direction override shows the text
in another order. `clean` escapes all of these.
"""

from __future__ import annotations

import json
import re
import traceback
import unicodedata
from collections.abc import Callable


class HealcoreError(BaseException):
    """Base class of all exceptions of healcore; each subclass also has a builtin base.

    Not an Exception: `RunStopped` and the other ends of a run are subclasses of SystemExit, so
    `except Exception` in a training loop does not catch them. All other errors are Exceptions.
    """

    def __str__(self) -> str:
        """The message, escaped for a terminal because it may quote untrusted files."""
        return clean(self._message())

    def _message(self) -> str:
        return super().__str__()


class AttachError(HealcoreError, TypeError):
    """`healcore.torch` cannot heal the optimizer it was given. Nothing was changed."""


class CommitError(HealcoreError, TypeError):
    """Two train states in JAX differ in structure, shapes or dtypes."""


class ParametersChangedError(HealcoreError, RuntimeError):
    """The optimizer has fewer parameters than before. The current step was not taken."""


class RanksDisagreeError(HealcoreError, RuntimeError):
    """The ranks of one run have decided differently. The current step was not taken."""


_NUMBERS = re.compile(r"\[[\[\]\s\d.,+\-einafNIF]{80,}\]")
"""A printed array, such as `[[-0.2883], [nan]]`, that is longer than a line."""


def error_text(error: BaseException) -> str:
    """The type and the message of an exception, also of an exception whose `__str__` raises.

    Printed arrays in the message are shortened.
    """
    return with_short_arrays("".join(traceback.format_exception_only(error)).strip())


def with_short_arrays(text: str) -> str:
    """The text with only the first numbers of each printed array."""
    return _NUMBERS.sub(lambda found: " ".join(found[0][:50].split()) + " ...]", text)


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
