"""`Deleter`: deletes checkpoints that are not needed any more, in the queue of the saves.

So the contents of a store depend on the steps, and not on the speed of a disk.
"""

from __future__ import annotations

import math
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from healcore.runtime.store.checkpoints import (
    CheckpointDamaged,
    CheckpointNotFound,
    Keep,
    superfluous,
)
from healcore.runtime.store.ranks import run_on_first

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

MAX_CANDIDATES = 8
"""Max checkpoints on probation in a store, unless `keep` is set."""


def default_keep(probation: int, every: int) -> Keep:
    """The checkpoints to keep on disk by default: among others the candidates of one probation."""
    saves_per_probation = math.ceil(probation / every)
    return Keep(candidates=min(saves_per_probation + 1, MAX_CANDIDATES), older=True)


class Deleter:
    """Deletes superfluous checkpoints each time that another checkpoint becomes known-good."""

    def __init__(self, run: Run, keep: Keep | None) -> None:
        """`keep` is None for the default."""
        self.run = run
        self.keep = keep or default_keep(run.policy.rollback.probation, run.schedule.every)
        """The checkpoints to keep on disk."""
        self._known_good_up_to = -1  # of the record, at the last deletion
        self._results: deque[set[int] | Exception] = deque()
        """Results of the background: steps of deleted checkpoints, or the problem."""

    def begin_attempt(self, step: int) -> None:
        """Begins an attempt at a step, after which no checkpoint is known-good."""
        self.read()
        self._known_good_up_to = min(self._known_good_up_to, step)

    def queue(self, step: int) -> None:
        """Queues the deletions that are due, if the save of `step` succeeds.

        A second rollback in the region of the last one must not use a checkpoint that became
        known-good later, so the target of the last one and the next older known-good one stay. The
        decision uses the attempts as saved, so that a restart knows the same known-good ones. The
        newest of them is verified first. If it is damaged, nothing is deleted.
        """
        store, record = self.run.store, self.run.record
        if record.known_good_up_to <= self._known_good_up_to:
            return
        self._known_good_up_to = record.known_good_up_to
        attempts, region = record.attempt_history, self.run.policy.rollback.region
        past = record.ledger.same_trouble(record.ledger.next_step, region)
        target = past[-1].target if past else -1
        stay = store.ring.protected | self.run.known.newer_than_start

        def choose() -> tuple[list[int], set[int], int | None]:
            saves = attempts.with_status(store.checkpoints())
            saves = [saved for saved in saves if saved.path or not store.durable]
            if (step, len(attempts.starts)) not in {(s.step, s.attempt) for s in saves}:
                return [], set(), None
            good = [saved.step for saved in saves if saved.status == "good"]
            older = [at for at in good if at < target][-1:]
            surplus = superfluous(saves, self.keep, stay={*stay, target, *older})
            abandoned = {saved.step for saved in saves if saved.status == "abandoned"}
            return surplus, {*surplus} - abandoned, max(good, default=None)

        def delete() -> None:
            try:
                surplus, deleted, newest = run_on_first(store.ranks, choose)
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
                self.run.known.remove(result)
            elif isinstance(result, CheckpointDamaged):
                self.run.known.lose(result)
            else:
                step = self.run.ledger.next_step
                self.run.log.event("problem", step=step, problem=str(result))
