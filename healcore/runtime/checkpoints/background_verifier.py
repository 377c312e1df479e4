"""Verifies checkpoints in the background, marks them as known-good and deletes surplus ones.

The training loop decides by its steps what is submitted, and in which order. Jobs run in that
order, so the contents of a store depend on the steps and not on the speed of a disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from healcore.runtime.events import fork_safety
from healcore.runtime.store import (
    CheckpointDamaged,
    CheckpointStore,
    NotFinite,
    NotThere,
    StoreError,
)
from healcore.runtime.store.background import Background
from healcore.runtime.store.memory import SnapshotStore


class VerifyResult(NamedTuple):
    """The result of verifying a checkpoint in one tier."""

    step: int
    error: Exception | None
    """What was wrong; None if the checkpoint is known-good now."""


class BackgroundVerifier:
    """Verifies one checkpoint after another in each tier, outside of the caller's thread.

    Stores with queues of their own (attribute `queues`, as all of healcore's) run the jobs there.
    Other stores' jobs run in its own thread, or with `in_background=False` in the caller's.
    """

    def __init__(self, *, in_background: bool = True) -> None:
        self._own = Background("healcore-verifier") if in_background else None
        self._used: list[Background] = []
        self._results: deque[VerifyResult] = deque()
        fork_safety.watch(self)

    def verify(
        self,
        store: CheckpointStore,
        step: int,
        *,
        then: Callable[[Any], None] = lambda tier: None,
        nearest_only: bool = False,
    ) -> None:
        """Queues a checkpoint to be verified and marked as known-good, in every tier that has it.

        `then` is called with each of these tiers afterwards, also if it is damaged or not finite
        there. `nearest_only`: no other tier has it.
        """
        queues = self._queues(store)

        def job(tier: Any) -> None:
            try:
                try:
                    tier.verify(step)
                    tier.mark(step, "good")
                    self._results.append(VerifyResult(step, None))
                except CheckpointDamaged as error:
                    self._results.append(VerifyResult(step, error))
                    _remove_damaged(tier, step, only_tier=len(queues) == 1)
                except NotFinite as error:
                    self._results.append(VerifyResult(step, error))
                then(tier)
            except NotThere:
                return
            except Exception as error:
                self._results.append(VerifyResult(step, error))

        for tier, queue in queues[:1] if nearest_only else queues:
            self._submit(queue, step, lambda tier=tier: job(tier))

    def submit(self, store: CheckpointStore, step: int, action: Callable[[Any], None]) -> None:
        """Queues an action on the farthest tier, after all jobs so far; `step` is for errors."""
        tier, queue = self._queues(store)[-1]
        self._submit(queue, step, lambda: action(tier))

    def results(self) -> list[VerifyResult]:
        """Results since the last call, oldest first."""
        return [self._results.popleft() for _ in range(len(self._results))]

    def wait(self) -> None:
        """Waits for all jobs; their results stay available."""
        for queue in self._used:
            queue.join()

    def discard(self) -> None:
        """Waits for all jobs and drops their results: the list of checkpoints has changed."""
        self.wait()
        self._results.clear()

    def forked(self) -> None:
        """In a forked child: the jobs and their results belong to the parent."""
        self._results.clear()

    def _queues(self, store: Any) -> list[tuple[Any, Background | None]]:
        queues = getattr(store, "queues", None)
        return [(store, self._own)] if queues is None else queues()

    def _submit(self, queue: Background | None, step: int, job: Callable[[], None]) -> None:
        if queue is None:
            job()
            return
        if queue not in self._used:
            self._used.append(queue)
        queue.submit(step, "while verifying it", job)


def _remove_damaged(tier: Any, step: int, *, only_tier: bool) -> None:
    """Keeps a damaged copy from being restored: drops it from memory if there is one on disk."""
    try:
        if isinstance(tier, SnapshotStore) and not only_tier:
            tier.drop(step)
        else:
            tier.mark(step, "quarantined")
    except StoreError:
        return  # no longer listed, or the disk cannot be written; the damage is reported anyway
