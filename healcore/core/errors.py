"""The base of every exception that healcore raises."""

from __future__ import annotations


class HealcoreError(BaseException):
    """Anything that healcore raises by name; each class has its builtin base besides.

    Not an Exception by itself: `RunStopped` and the other ends of a run are a SystemExit, which
    `except Exception` in a training loop must not swallow. All others are Exceptions.
    """
