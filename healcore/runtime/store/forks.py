"""Resets objects with locks or threads in forked children."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 -- its hook has to be older than the one below
import os
import weakref
from typing import Protocol

FORK_WAIT = 1.0
"""Seconds that a fork waits for each watched object that is at work (see `watch_forks`)."""


class ForkWatcher(Protocol):
    """An object with locks or threads, which a forked child has to reset.

    It may also have a method `join(seconds)`, which waits until its threads are idle.
    """

    def forked(self) -> None:
        """Resets the object in a forked child, in which its threads do not exist."""
        ...


_watched: weakref.WeakSet[ForkWatcher] = weakref.WeakSet()


def watch_forks(target: ForkWatcher) -> None:
    """Resets an object in each later forked child, without keeping the object alive.

    A forked child inherits locks but not the threads that hold them. Data loaders fork their
    workers while a save is in progress: without a reset, a worker would wait forever for the save.
    No reset frees the locks of libc and torch. So a fork first waits until the threads are idle:

        parent:  target.join(FORK_WAIT) ── fork ── continues, its threads run
                                             │
        child:                               └──── target.forked() ── continues, without threads

    Args:
        target: its `forked()` is called in the child. Its `join(FORK_WAIT)` is called before the
            fork if the target has a `join`. The target has to be hashable.
    """
    _watched.add(target)


def _wait_before_fork() -> None:
    for target in list(_watched):
        join = getattr(target, "join", None)
        if join is not None:
            join(FORK_WAIT)


def _reset_after_fork() -> None:
    for target in list(_watched):
        target.forked()


# The hooks before a fork run the newest first. `concurrent.futures.thread` has a hook that takes a
# lock, which a save needs to start threads. Its import above registers that hook before this one.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_before_fork, after_in_child=_reset_after_fork)
