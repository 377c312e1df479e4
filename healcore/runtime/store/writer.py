"""`Writer`: a queue of jobs in the background of the training loop."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

from healcore import console
from healcore.runtime.store.checkpoints import SaveFailed, StoreError
from healcore.runtime.store.forks import watch_forks


class Writer:
    """Saves and deletes in the background, one job at a time, in the order of submission.

    Each job has a thread of its own, so that a run that has ended keeps no thread. The error of a
    job becomes a SaveFailed, which is reported once. A program that ends waits for all jobs and
    logs failures that were not reported. In a forked child the queue is empty: the jobs belong to
    the parent.
    """

    def __init__(self) -> None:
        self._newest: threading.Thread | None = None
        """The thread of the last job: if it has ended, all jobs are done."""
        self._working: threading.Thread | None = None
        """The thread of the job at work, or of the last one."""
        self._failures: list[StoreError] = []
        """The errors that no call has raised or returned, oldest first."""
        watch_forks(self)

    def submit(self, step: int, job: Callable[[], None]) -> None:
        """Runs a job in the background, after the jobs so far.

        Args:
            step: step of the checkpoint, which the job's errors name.
            job: the function to call. If it raises SaveFailed, this error is reported as it is.
        """
        previous = self._newest
        if previous is None:
            _call_before_exit(self._finish)

        def run() -> None:
            if previous is not None:
                previous.join()
            self._working = threading.current_thread()
            try:
                job()
            except SaveFailed as failure:
                self._failures.append(failure)
            except BaseException as error:
                self._failures.append(SaveFailed(step, "in the background", error))

        self._newest = threading.Thread(target=run, name="healcore-writer")
        self._newest.start()

    @property
    def busy(self) -> bool:
        """Whether there are jobs to wait for. False for a job, which would wait for itself."""
        newest = self._newest
        is_job = threading.current_thread() is self._working
        return newest is not None and newest.is_alive() and not is_job

    def join(self, timeout: float | None = None) -> None:
        """Waits until all jobs are done. Raises no failures.

        Args:
            timeout: longest time to wait, in seconds, or None for no limit.
        """
        if self.busy and self._newest is not None:
            self._newest.join(timeout)

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
        taken: list[StoreError] = []
        while self._failures:  # the thread may add one at any time
            taken.append(self._failures.pop(0))
        return taken

    def forked(self) -> None:
        """Empties the queue in a forked child, where the thread does not exist.

        A child that waited for a job of its parent would wait forever. The parent reports the
        failures of its jobs.
        """
        self._newest = None
        self._failures = []

    def _finish(self) -> None:
        """Waits for all jobs, and logs their failures, before the program ends."""
        self.join()
        for failure in self.take_failures():
            console.warning(str(failure))


def _call_before_exit(method: Callable[[], None]) -> None:
    """Calls a bound method when the program ends, while threads can still be started.

    At `atexit` the interpreter starts no more threads, but the frameworks' writers need threads.
    The earlier hook is private. On an interpreter without it an unfinished save is lost.
    """
    hooks: Any = threading
    reference = weakref.WeakMethod(method)
    # The interpreter raises RuntimeError if it is already ending. A job of another store then
    # started this queue, and that store waits for it.
    with contextlib.suppress(AttributeError, RuntimeError):
        hooks._register_atexit(_call_if_alive, reference)


def _call_if_alive(reference: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Calls a bound method, unless its object was deleted."""
    method = reference()
    if method is not None:
        method()
