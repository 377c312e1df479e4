"""Base class of all exceptions that healcore raises."""

from __future__ import annotations

from healcore.core.printable import clean


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
