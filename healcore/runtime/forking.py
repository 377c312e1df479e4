"""What a forked child inherits of ours: jobs and locks of threads that it does not have.

Data loaders fork their workers while a save is under way. A worker that waited at its end for that
save would wait for ever, and one that met a lock held at the fork as well.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Inherited(Protocol):
    """Something with threads or locks."""

    def forked(self) -> None:
        """In a child, before anything else runs there: lets go of all of them."""
        ...


_watched: weakref.WeakSet[Inherited] = weakref.WeakSet()


def watch(each: Inherited) -> None:
    """Has `each.forked` called in every child forked from now on, as long as it lives."""
    _watched.add(each)


def _in_child() -> None:
    for each in list(_watched):
        each.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
