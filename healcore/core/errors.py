"""`HealcoreError`, errors that several adapters raise, and texts that are safe for a terminal.

Messages may quote names from untrusted files, whose escape sequences a terminal would execute: they
set the window's title, hide a line or write to the clipboard. A direction override shows the text
in another order. `clean` escapes all such characters.
"""

from __future__ import annotations

import json
import unicodedata


class HealcoreError(BaseException):
    """Base class of all exceptions of healcore; each subclass also has a builtin base.

    Not an Exception: `RunStopped` and the other ends of a run are subclasses of SystemExit, so
    `except Exception` in a training loop does not catch them. All other errors are Exceptions. The
    text of every error is escaped for a terminal. Tracebacks name `__module__`, from which programs
    import the error.
    """

    __module__ = "healcore"

    def __str__(self) -> str:
        """The message, escaped for a terminal because it may quote untrusted files."""
        return clean(self._message())

    def _message(self) -> str:
        return super().__str__()


class AttachError(HealcoreError, TypeError):
    """`healcore.torch` cannot heal the optimizer it was given. Nothing was changed.

    For example, another object already replaces its `step`. The message says what to pass or call
    instead.
    """

    __module__ = "healcore.errors"


class CommitError(HealcoreError, TypeError):
    """Two train states in JAX differ in structure, shapes or dtypes."""

    __module__ = "healcore.errors"


class ParametersChangedError(HealcoreError, RuntimeError):
    """The optimizer has fewer parameters than before. The current step was not taken."""

    __module__ = "healcore.errors"


class RanksDisagreeError(HealcoreError, RuntimeError):
    """The ranks of one run have decided differently. The current step was not taken.

    If one rank took the step and another skipped it, their weights would differ from then on, and
    no later error would say why.
    """

    __module__ = "healcore.errors"


# -- texts that are safe for a terminal --------------------------------------------------------


def clean(text: str, keep: str = "\n\t", *, as_json: bool = False) -> str:
    r"""Escapes all characters except printable ones, spaces and those in `keep`.

    Control characters (ESC, C1), direction overrides and invisible characters become `\x1b` or
    `\u202e`, as in TOML and Python.

    Args:
        text: a text that may come from a file that somebody else wrote.
        keep: characters to leave as they are. Pass "" for names, which have one line.
        as_json: whether the text is a JSON document, whose content stays the same.
    """
    if text.isascii() and text.isprintable():
        return text
    cleaned = []
    for char in text:
        if char.isprintable() or char in keep or unicodedata.category(char) == "Zs":
            cleaned.append(char)
        elif as_json:
            cleaned.append(json.dumps(char)[1:-1])
        else:
            cleaned.append(_escape(char))
    return "".join(cleaned)


def _escape(char: str) -> str:
    code = ord(char)
    if code < 0x80:  # includes \t and \n
        return char.encode("unicode_escape").decode()
    if code < 0x10000:
        return f"\\u{code:04x}"
    return f"\\U{code:08x}"
