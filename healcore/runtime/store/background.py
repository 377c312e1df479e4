"""Jobs in the background of the training loop, one after another, and their errors."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from healcore import console
from healcore.events import fork_safety
from healcore.runtime.store.errors import SaveFailed


class Background:
    """A single worker thread, which does jobs in the order in which they were submitted.

    Their results depend on that order and not on how long one takes. The error of a job is kept as
    a SaveFailed and reported once; its future holds none. A program that ends waits for the jobs
    under way, and logs failures not reported by then. A forked child has no jobs: they are its
    parent's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: ThreadPoolExecutor | None = None
        self._jobs: deque[Future[None]] = deque()
        self._worker = 0
        self._failures: list[SaveFailed] = []
        fork_safety.watch(self)

    def submit(self, step: int, doing: str, job: Callable[[], None]) -> Future[None]:
        """Puts a job at the end of the queue; `step` and `doing` ("while …") are for its error."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix=self._name)
            _before_the_end(self._finish)

        def run() -> None:
            self._worker = threading.get_ident()
            try:
                job()
            except SaveFailed as failure:
                self._failures.append(failure)
            except BaseException as error:
                self._failures.append(SaveFailed(step, doing, error))

        while self._jobs and self._jobs[0].done():
            self._jobs.popleft()
        self._jobs.append(self._pool.submit(run))
        return self._jobs[-1]

    def join(self) -> None:
        """Waits for all jobs so far; their errors stay to be reported."""
        if threading.get_ident() == self._worker:
            return  # a job would wait for itself
        for job in tuple(self._jobs):
            job.result()

    @property
    def waiting(self) -> int:
        """Jobs that are not done."""
        return sum(not job.done() for job in tuple(self._jobs))

    @property
    def busy(self) -> bool:
        """Whether any job is not done."""
        return self.waiting > 0

    def pending(self, job: Future[None] | None) -> bool:
        """Whether a job is in this queue and not done. Jobs of a fork's parent are not in it."""
        return job is not None and job in self._jobs and not job.done()

    def wait(self) -> None:
        """Waits, and raises the oldest failure that was not reported yet."""
        self.join()
        if self._failures:
            failure = self._failures.pop(0)
            raise failure from failure.error

    def failures(self) -> list[SaveFailed]:
        """The failures so far, without waiting. Each is reported once."""
        found = []
        while self._failures:
            found.append(self._failures.pop(0))
        return found

    def forked(self) -> None:
        """In a child: the thread is the parent's alone."""
        self._pool, self._worker = None, 0
        self._jobs, self._failures = deque(), []

    def _finish(self) -> None:
        self.join()
        for failure in self.failures():
            console.warning(str(failure))


def _before_the_end(method: Callable[[], None]) -> None:
    """Calls a bound method when the program ends and threads can still be started.

    At `atexit` the interpreter starts no more threads, and the frameworks' writers need some. The
    earlier hook is private; where it is missing, an unfinished save is dropped whole.
    """
    register: Any = getattr(threading, "_register_atexit", None)
    if register is not None:
        reference = weakref.WeakMethod(method)

        def finish() -> None:
            alive = reference()
            if alive is not None:
                alive()

        # Refused while the interpreter ends: then a job of another store started this one, and
        # that store waits for it.
        with contextlib.suppress(RuntimeError):
            register(finish)
