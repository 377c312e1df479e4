"""Resets objects in a forked child, which inherits locks but not the threads that hold them.

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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [each.forked() for each in list(_watched)])
