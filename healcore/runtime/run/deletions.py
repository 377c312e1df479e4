"""`Deletions`: deletes superfluous checkpoints of a run, in the queue of the saves.

So the contents of a store depend on the steps, and not on the speed of a disk.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress

from healcore.runtime.run.known_checkpoints import KnownCheckpoints
from healcore.runtime.run.run_context import RunContext
from healcore.runtime.store.ranks import on_first
from healcore.runtime.store.saved import CheckpointDamaged, CheckpointNotFound, Keep, superfluous

MAX_CANDIDATES = 8
"""Max checkpoints on probation in a store, unless `keep` is set."""


class Deletions:
    """Deletes superfluous checkpoints each time that another checkpoint becomes known-good."""

    def __init__(
        self, context: RunContext, checkpoints: KnownCheckpoints, keep: Keep | None, every: int
    ) -> None:
        """Takes the steps `every` between two saves: by default one probation is kept."""
        candidates = min(-(-context.policy.rollback.probation // every) + 1, MAX_CANDIDATES)
        self._keep = keep or Keep(candidates=candidates, older=True)
        self._context, self._checkpoints = context, checkpoints
        self._known_good_up_to = -1  # of the record, at the last deletion
        self._results: deque[set[int] | Exception] = deque()
        """Results of the background: steps of deleted checkpoints, or the problem."""

    def begin_attempt(self, step: int) -> None:
        """Begins an attempt at a step, after which no checkpoint is known-good."""
        self.read()
        self._known_good_up_to = min(self._known_good_up_to, step)

    def queue(self, step: int) -> None:
        """Queues the deletions that are due, if the save of `step` succeeds.

        Within the region of the last rollback, its target and the next older known-good checkpoint
        stay: a second rollback there must not use a checkpoint that became known-good later. The
        decision uses the attempts as saved, so that a restart knows the same known-good ones. The
        newest of them is verified first: nothing is deleted for a damaged one.
        """
        store, record = self._context.store, self._context.record
        if record.known_good_up_to <= self._known_good_up_to:
            return
        self._known_good_up_to = record.known_good_up_to
        attempts, region = record.attempt_history, self._context.policy.rollback.region
        past = record.ledger.same_trouble(record.ledger.next_step, region)
        target = past[-1].target if past else -1
        stay = store.ring.protected | self._checkpoints.newer_than_start

        def chosen() -> tuple[list[int], set[int], int | None]:
            saves = attempts.with_status(store.steps())
            saves = [saved for saved in saves if saved.path or not store.durable]
            if (step, len(attempts.starts)) not in {(s.step, s.attempt) for s in saves}:
                return [], set(), None
            good = [saved.step for saved in saves if saved.status == "good"]
            older = [at for at in good if at < target][-1:]
            surplus = superfluous(saves, self._keep, stay={*stay, target, *older})
            abandoned = {saved.step for saved in saves if saved.status == "abandoned"}
            return surplus, {*surplus} - abandoned, max(good, default=None)

        def delete() -> None:
            try:
                surplus, deleted, newest = on_first(store.ranks, chosen)
                if surplus and newest is not None:
                    store.verify(newest)
                for old in surplus:
                    with suppress(CheckpointNotFound):
                        store.delete(old)
                self._results.append(deleted)
            except Exception as error:
                self._results.append(error)

        store.submit(step, delete)

    def read(self) -> None:
        """Reads the results of the background. Does not wait."""
        while self._results:
            result = self._results.popleft()
            if isinstance(result, set):
                self._checkpoints.remove(result)
            elif isinstance(result, CheckpointDamaged):
                self._checkpoints.lose(result)
            else:
                step = self._context.ledger.next_step
                self._context.log.event("problem", step=step, problem=str(result))
