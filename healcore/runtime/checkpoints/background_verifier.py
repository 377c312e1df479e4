"""Verifies checkpoints in the background and marks them as known-good.

The training loop submits jobs by its steps, and jobs run in that order. So the contents of a store
depend on the steps, not on the speed of a disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from healcore.events import fork_safety
from healcore.runtime.store import CheckpointDamaged, CheckpointNotFound, CheckpointStore, NotFinite
from healcore.runtime.store.background import Background


class VerifyResult(NamedTuple):
    """The result of verifying a checkpoint in one tier."""

    step: int
    error: Exception | None
    """The problem, or None if the checkpoint is known-good now."""


class BackgroundVerifier:
    """Verifies one checkpoint after another in each tier.

    Jobs run in the tier's queue. Jobs of a tier without a queue run in a thread of this object, or
    in the caller's thread if not `in_background`.
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
        then: Callable[[CheckpointStore], None] = lambda tier: None,
        nearest_only: bool = False,
    ) -> None:
        """Queues a checkpoint to be verified and marked as known-good, in every tier.

        Args:
            store: store of the checkpoint.
            step: step of the checkpoint.
            then: called with each tier that has the checkpoint, even if it is damaged.
            nearest_only: whether only the first tier has the checkpoint.
        """
        tiers = store.tiers

        def job(tier: CheckpointStore) -> None:
            try:
                try:
                    tier.verify(step)
                    tier.mark(step, "good")
                    self._results.append(VerifyResult(step, None))
                except CheckpointDamaged as error:
                    self._results.append(VerifyResult(step, error))
                    tier.take_out(step, copied=len(tiers) > 1)
                except NotFinite as error:
                    self._results.append(VerifyResult(step, error))
                then(tier)
            except CheckpointNotFound:
                return
            except Exception as error:
                self._results.append(VerifyResult(step, error))

        for tier in tiers[:1] if nearest_only else tiers:
            self._submit(tier, step, job)

    def submit(
        self, store: CheckpointStore, step: int, action: Callable[[CheckpointStore], None]
    ) -> None:
        """Queues an action on the last tier; `step` appears in errors."""
        self._submit(store.tiers[-1], step, action)

    def results(self) -> list[VerifyResult]:
        """Results since the last call, oldest first."""
        return [self._results.popleft() for _ in range(len(self._results))]

    def wait(self) -> None:
        """Waits for all jobs; their results stay available."""
        for queue in self._used:
            queue.join()

    def discard(self) -> None:
        """Waits for all jobs and drops their results."""
        self.wait()
        self._results.clear()

    def forked(self) -> None:
        """Drops the results in a forked child: they belong to the parent."""
        self._results.clear()

    def _submit(
        self, tier: CheckpointStore, step: int, job: Callable[[CheckpointStore], None]
    ) -> None:
        queue = tier.queue or self._own
        if queue is None:
            job(tier)
            return
        if queue not in self._used:
            self._used.append(queue)
        queue.submit(step, "while verifying it", lambda: job(tier))
