"""One job at a time behind the training loop, and the errors it met."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from healcore.runtime import forking
from healcore.runtime.store.errors import SaveFailed

_log = logging.getLogger(__name__)


class Background:
    """A single worker thread. A job that fails leaves a SaveFailed to be collected once.

    A program that ends waits for the job under way. Failures that nobody has collected by then are
    logged as errors. A forked child has neither the job nor the failures: they are its parent's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: ThreadPoolExecutor | None = None
        self._job: Future[None] | None = None
        self._failures: list[SaveFailed] = []
        forking.watch(self)

    def submit(self, step: int, doing: str, job: Callable[[], None]) -> None:
        """Starts a job once the one before has ended.

        Args:
            step: whose save it is, for the error.
            doing: what it does, for the error: "while writing".
            job: raises what went wrong.
        """
        self.join()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix=self._name)
            _before_the_end(self._finish)

        def run() -> None:
            try:
                job()
            except SaveFailed as failure:
                self._failures.append(failure)
            except BaseException as error:
                self._failures.append(SaveFailed(step, doing, error))

        self._job = self._pool.submit(run)

    def join(self) -> None:
        """Waits for the job under way; its error stays to be collected. From any thread."""
        job = self._job
        if job is not None:
            job.result()

    @property
    def busy(self) -> bool:
        """Whether a job is under way."""
        return self._job is not None and not self._job.done()

    def wait(self) -> None:
        """Waits, and raises the oldest failure that was not told yet."""
        self.join()
        if self._failures:
            failure = self._failures.pop(0)
            raise failure from failure.error

    def failures(self) -> list[SaveFailed]:
        """The failures so far, without waiting. Each is told once."""
        told = []
        while self._failures:
            told.append(self._failures.pop(0))
        return told

    def forked(self) -> None:
        """In a child: the thread is the parent's alone."""
        self._pool, self._job, self._failures = None, None, []

    def _finish(self) -> None:
        self.join()
        for failure in self.failures():
            _log.error("%s", failure)


def _before_the_end(method: Callable[[], None]) -> None:
    """Calls a bound method when the program ends and threads can still be started.

    `atexit` is too late: by then the interpreter starts no more threads, and the frameworks'
    writers need some. The earlier place is private; where it is missing an unfinished save is
    dropped at the end, whole.
    """
    register: Any = getattr(threading, "_register_atexit", None)
    if register is not None:
        reference = weakref.WeakMethod(method)

        def finish() -> None:
            alive = reference()
            if alive is not None:
                alive()

        # Refused at the end itself: then it is a job of another store that started this one,
        # and that store waits for it.
        with contextlib.suppress(RuntimeError):
            register(finish)
