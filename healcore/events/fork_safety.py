"""Resets objects in a forked child, which inherits locks but not the threads that hold them.

Data loaders fork their workers while a save is in progress. A worker that waits for the save, or
for a lock that was held at the fork, would wait forever.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Inherited(Protocol):
    """An object with threads or locks."""

    def forked(self) -> None:
        """Drops threads and locks. Called in the child before anything else runs there."""
        ...


_watched: weakref.WeakSet[Inherited] = weakref.WeakSet()


def watch(each: Inherited) -> None:
    """Calls `each.forked` in every later forked child while `each` is alive."""
    _watched.add(each)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [each.forked() for each in list(_watched)])
