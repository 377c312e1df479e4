"""Base class of all exceptions that healcore raises, and the errors of its adapters."""

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


class AttachError(HealcoreError, TypeError):
    """`healcore.torch` cannot heal the optimizer it was given. Nothing was changed."""


class CommitError(HealcoreError, TypeError):
    """Two train states in JAX differ in structure, shapes or dtypes."""


class ParametersChangedError(HealcoreError, RuntimeError):
    """The optimizer has fewer parameters than before. The current step was not taken."""


class RanksDisagreeError(HealcoreError, RuntimeError):
    """The ranks of one run have decided differently. The current step was not taken."""
