"""The base of every exception that healcore raises."""

from __future__ import annotations

from healcore.core.printable import clean


class HealcoreError(BaseException):
    """Base of every exception of healcore; each class also has a builtin base.

    Not an Exception: `RunStopped` and the other ends of a run are a SystemExit, which
    `except Exception` in a training loop must not catch. All others are Exceptions.
    """

    def __str__(self) -> str:
        """The message, safe for a terminal: parts of it may come from files of any origin."""
        return clean(self._message())

    def _message(self) -> str:
        return super().__str__()
