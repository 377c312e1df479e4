"""Resets in a forked child: it inherits jobs and locks of threads that it does not have.

Data loaders fork their workers while a save is in progress. A worker that waited for that save, or
for a lock that was held at the fork, would wait for ever.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Inherited(Protocol):
    """An object with threads or locks."""

    def forked(self) -> None:
        """Drops all of them. Called in the child before anything else runs there."""
        ...


_watched: weakref.WeakSet[Inherited] = weakref.WeakSet()


def watch(each: Inherited) -> None:
    """Calls `each.forked` in every child forked from now on, as long as `each` lives."""
    _watched.add(each)


def _in_child() -> None:
    for each in list(_watched):
        each.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
