"""Proving checkpoints behind the training loop: verified, marked as good, the others thinned out.

What is asked for, and in which order, the training loop decides by its steps. It is carried out in
that order, so what a store ends up with follows from the steps, however long a disk takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from healcore.runtime import forking
from healcore.runtime.store import CheckpointDamaged, CheckpointStore, NotThere, StoreError
from healcore.runtime.store.background import Background
from healcore.runtime.store.memory import MemoryStore


class Verdict(NamedTuple):
    """What has come of a proof in one tier."""

    step: int
    error: Exception | None
    """What was wrong; None: it is known-good now."""


class BackgroundVerifier:
    """One proof after another in each tier, none of them in the caller's thread.

    Stores with queues of their own (`queues`, which all of healcore's have) are asked in those,
    another store in a thread that the BackgroundVerifier has for it.

    Args:
        behind: False proves in the caller's thread in a store without queues.
    """

    def __init__(self, *, behind: bool = True) -> None:
        self._own = Background("healcore-verifier") if behind else None
        self._used: list[Background] = []
        self._verdicts: deque[Verdict] = deque()
        forking.watch(self)

    def ask(
        self,
        store: CheckpointStore,
        step: int,
        tidy: Callable[[Any], None] = lambda tier: None,
        *,
        near_only: bool = False,
    ) -> None:
        """Has a checkpoint verified and marked as good, in every tier that has it.

        Args:
            store: the checkpoints.
            step: which.
            tidy: is given the tier once the checkpoint is known-good in it.
            near_only: it is in the nearest tier and no other.
        """
        queues = self._queues(store)

        def prove(tier: Any) -> None:
            try:
                tier.verify(step)
                tier.mark(step, "good")
                self._verdicts.append(Verdict(step, None))
                tidy(tier)
            except NotThere:
                return
            except Exception as error:
                self._verdicts.append(Verdict(step, error))
                if isinstance(error, CheckpointDamaged):
                    _take_out(tier, step, last=len(queues) == 1)

        for tier, queue in queues[:1] if near_only else queues:
            self._do(queue, step, lambda tier=tier: prove(tier))

    def later(self, store: CheckpointStore, step: int, action: Callable[[Any], None]) -> None:
        """Runs an action on the farthest tier, after all that was asked for before.

        Args:
            store: the checkpoints.
            step: the run's, for an error.
            action: is given the tier.
        """
        tier, queue = self._queues(store)[-1]
        self._do(queue, step, lambda: action(tier))

    def verdicts(self) -> list[Verdict]:
        """What has come of the proofs since the last call, oldest first."""
        told = []
        while self._verdicts:
            told.append(self._verdicts.popleft())
        return told

    def finish(self) -> None:
        """Waits until everything that was asked for is done; the verdicts stay to be taken."""
        for queue in self._used:
            queue.join()

    def drop(self) -> None:
        """Waits, and forgets the verdicts: the list of checkpoints has changed meanwhile."""
        self.finish()
        self._verdicts.clear()

    def forked(self) -> None:
        """In a child: what was asked for is done in the parent alone."""
        self._verdicts.clear()

    def _queues(self, store: Any) -> list[tuple[Any, Background | None]]:
        look = getattr(store, "queues", None)
        return [(store, self._own)] if look is None else look()

    def _do(self, queue: Background | None, step: int, job: Callable[[], None]) -> None:
        if queue is None:
            job()
            return
        if queue not in self._used:
            self._used.append(queue)
        queue.submit(step, "while proving it", job)


def _take_out(tier: Any, step: int, *, last: bool) -> None:
    """No damaged copy is restored; one in memory makes way for the one on disk."""
    try:
        if isinstance(tier, MemoryStore) and not last:
            tier.drop(step)
        else:
            tier.mark(step, "quarantined")
    except StoreError:
        return  # not listed any more, or on a disk that cannot be written; the damage is told
