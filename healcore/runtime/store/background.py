"""A queue of jobs in the background of the training loop."""

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
    """One worker thread, which runs jobs in the order in which they were submitted.

    The error of a job is stored as a SaveFailed and reported once; its future holds no error. A
    program that ends waits for all jobs and logs failures that were not reported. In a forked child
    the queue is empty: the jobs belong to the parent.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: ThreadPoolExecutor | None = None
        self._jobs: deque[Future[None]] = deque()
        self._worker = 0
        self._failures: list[SaveFailed] = []
        fork_safety.watch(self)

    def submit(self, step: int, doing: str, job: Callable[[], None]) -> Future[None]:
        """Queues a job; `step` and `doing` ("while …") describe it in errors."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix=self._name)
            _call_before_exit(self._finish)

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
        """Waits for all queued jobs; raises no errors."""
        if threading.get_ident() == self._worker:
            return  # called by a job, which would wait for itself
        for job in tuple(self._jobs):
            job.result()

    @property
    def busy(self) -> bool:
        """Whether any job is not done."""
        return not all(job.done() for job in tuple(self._jobs))

    def wait(self) -> None:
        """Waits for all jobs, then raises the oldest failure that was not reported."""
        self.join()
        if self._failures:
            failure = self._failures.pop(0)
            raise failure from failure.error

    def failures(self) -> list[SaveFailed]:
        """The failures that were not reported yet, without waiting."""
        return [self._failures.pop(0) for _ in range(len(self._failures))]

    def forked(self) -> None:
        """Empties the queue in a forked child, where the thread does not exist."""
        self._pool, self._worker = None, 0
        self._jobs, self._failures = deque(), []

    def _finish(self) -> None:
        self.join()
        for failure in self.failures():
            console.warning(str(failure))


def _call_before_exit(method: Callable[[], None]) -> None:
    """Calls a bound method when the program ends, while threads can still be started.

    At `atexit` the interpreter starts no more threads, but the frameworks' writers need threads.
    The earlier hook is private. On an interpreter without it an unfinished save is lost.
    """
    register: Any = getattr(threading, "_register_atexit", None)
    if register is not None:
        reference = weakref.WeakMethod(method)

        def finish() -> None:
            alive = reference()
            if alive is not None:
                alive()

        # The interpreter raises RuntimeError if it is already ending. A job of another store then
        # started this queue, and that store waits for it.
        with contextlib.suppress(RuntimeError):
            register(finish)
