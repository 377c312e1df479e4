"""Resets objects in a forked child, which inherits locks but not the threads that hold them.

Data loaders fork their workers while a save is in progress. Without a reset, a worker would wait
forever for the save, or for a lock that another thread held at the fork.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class ForkAware(Protocol):
    """An object that has threads or locks."""

    def forked(self) -> None:
        """Replaces threads and locks. Called in the child before any other code."""
        ...


_watched: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def watch(target: ForkAware) -> None:
    """Calls `target.forked` in each later forked child, without keeping `target` alive."""
    _watched.add(target)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [target.forked() for target in list(_watched)])
