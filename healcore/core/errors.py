"""The base of every exception that healcore raises."""

from __future__ import annotations


class HealcoreError(BaseException):
    """Base of every exception of healcore; each class also has a builtin base.

    Not an Exception: `RunStopped` and the other ends of a run are a SystemExit, which
    `except Exception` in a training loop must not catch. All others are Exceptions.
    """
