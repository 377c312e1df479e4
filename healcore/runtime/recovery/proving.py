"""Verifying a checkpoint behind the training loop, before it is called known-good."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from healcore.runtime import forking
from healcore.runtime.store import CheckpointStore, Saved


class Prover:
    """One verification at a time, in a thread of its own.

    Args:
        behind: False verifies at once, in the caller's thread. With several ranks the store's
            exchanges must come in the same order everywhere, and a thread of its own cannot
            promise that.
    """

    def __init__(self, *, behind: bool = True) -> None:
        self._behind = behind
        self._pool: ThreadPoolExecutor | None = None
        self._job: tuple[int, Future[Saved]] | None = None
        forking.watch(self)

    @property
    def busy(self) -> bool:
        """Whether a verification is under way, or its verdict not taken yet."""
        return self._job is not None

    def begin(self, store: CheckpointStore, step: int) -> None:
        """Starts verifying a checkpoint."""
        assert self._job is None, "one at a time"
        if self._behind:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="healcore-prover")
            self._job = step, self._pool.submit(store.verify, step)
            return
        future: Future[Saved] = Future()
        try:
            future.set_result(store.verify(step))
        except Exception as error:
            future.set_exception(error)
        self._job = step, future

    def verdict(self) -> tuple[int, Exception | None] | None:
        """The step, and what was wrong with it, if a verification is done; each is told once."""
        if self._job is None or not self._job[1].done():
            return None
        step, future = self._job
        self._job = None
        error = future.exception()
        if error is not None and not isinstance(error, Exception):
            raise error
        return step, error

    def finish(self) -> None:
        """Waits for the verification under way; the verdict stays to be taken."""
        if self._job is not None:
            self._job[1].exception()

    def drop(self) -> None:
        """Waits, and forgets the verdict: the list of checkpoints has changed meanwhile."""
        self.finish()
        self._job = None

    def close(self) -> None:
        """Ends the thread."""
        self.drop()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def forked(self) -> None:
        """In a child: the thread is the parent's alone."""
        self._pool = self._job = None
