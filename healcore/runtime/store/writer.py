"""`Writer`: a queue of jobs in the background of the training loop."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 -- its hooks have to be older than those below
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from healcore import console
from healcore.runtime.store.checkpoints import SaveFailed, StoreError

FORK_WAIT = 1.0
"""Seconds that a fork waits for each writer that is at work."""
_NAME = "healcore-writer"
"""Name of the threads."""
_writers: weakref.WeakSet[Writer] = weakref.WeakSet()


class Writer:
    """Saves and deletes in the background, one job at a time, in the order of submission.

    Each job has a thread of its own, so that a run that has ended keeps no thread. The error of a
    job becomes a SaveFailed, which is reported once. A program that ends waits for all jobs and
    logs failures that were not reported. In a forked child no job is left: they are the parent's.
    """

    def __init__(self) -> None:
        self._newest: threading.Thread | None = None
        """The thread of the last job: if it has ended, all jobs are done."""
        self._failures: list[StoreError] = []
        """The errors that no call has raised or returned, oldest first."""
        _writers.add(self)

    def submit(self, step: int, job: Callable[[], None]) -> threading.Thread:
        """Runs a job in the background, after the jobs so far.

        Args:
            step: step of the checkpoint, which the job's errors name.
            job: the function to call. If it raises SaveFailed, this error is reported as it is.

        Returns:
            The thread, which ends with the job.
        """
        previous = self._newest

        def run() -> None:
            if previous is not None:
                previous.join()
            try:
                job()
            except SaveFailed as failure:
                self._failures.append(failure)
            except BaseException as error:
                self._failures.append(SaveFailed(step, "in the background", error))

        self._newest = threading.Thread(target=run, name=_NAME)
        self._newest.start()
        return self._newest

    def join(self, timeout: float | None = None) -> None:
        """Waits until all jobs are done. Raises no failures. A job itself does not wait.

        Args:
            timeout: longest time to wait, in seconds, or None for no limit.
        """
        if self._newest is not None and not self.in_background():
            self._newest.join(timeout)

    def in_background(self) -> bool:
        """Whether this is the thread of a job: it does not wait, as a later job waits for it."""
        return threading.current_thread().name == _NAME

    def wait(self) -> None:
        """Waits until every save is complete.

        Raises:
            SaveFailed: a save failed. Each call raises one failure. A failure is raised here or
                returned by `take_failures`, never both.
        """
        self.join()
        for failure in self._failures:
            if isinstance(failure, SaveFailed):
                self._failures.remove(failure)
                raise failure from failure.error

    def take_failures(self) -> list[StoreError]:
        """The errors since the last call that no call has raised. Does not wait.

        After an error other than SaveFailed, another copy was used (memory or directory).
        """
        # The thread may add one at any time.
        return [self._failures.pop(0) for _ in range(len(self._failures))]


def _wait_before_fork() -> None:
    """A child of a fork inherits the locks of libc and torch, but not the threads that hold them.

    Data loaders fork their workers while a save is in progress. A worker would wait forever.
    """
    for each in list(_writers):
        each.join(FORK_WAIT)


def _finish_before_exit() -> None:
    """Waits for all jobs, and logs their failures, before the program ends."""
    for each in list(_writers):
        each.join()
        for failure in each.take_failures():
            console.warning(str(failure))


# The newest hook runs first. The hooks of `concurrent.futures.thread` are registered by its import:
# before a fork, one takes a lock that a save needs to start threads, and at the end of a program
# the other lets no more threads start. At `atexit` it is too late to start any.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_before_fork)
_hooks: Any = threading
if hasattr(_hooks, "_register_atexit"):  # private; without it an unfinished save is lost
    _hooks._register_atexit(_finish_before_exit)
