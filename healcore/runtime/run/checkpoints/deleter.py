"""`Deleter`: deletes checkpoints that are not needed any more.

It deletes in the queue of the saves. So the contents of a store depend on the steps, and not on the
speed of a disk.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.checkpoints.known import KnownCheckpoints
from healcore.runtime.run_options import HostPolicy
from healcore.runtime.store.checkpoints import (
    AttemptHistory,
    CheckpointDamaged,
    CheckpointNotFound,
    Keep,
    superfluous,
)
from healcore.runtime.store.ranks import run_on_first
from healcore.runtime.store.store import CheckpointStore

if TYPE_CHECKING:
    from healcore.runtime.run.ledger import Ledger
    from healcore.runtime.run.run_record import RunRecord

MAX_CANDIDATES = 8
"""Max checkpoints on probation in a store, unless `keep` is set."""


def default_keep(probation: int, every: int) -> Keep:
    """The checkpoints to keep on disk by default: among others the candidates of one probation.

    Args:
        probation: healthy steps after which a checkpoint is known-good.
        every: steps between two saves.
    """
    saves_per_probation = math.ceil(probation / every)
    return Keep(candidates=min(saves_per_probation + 1, MAX_CANDIDATES), older=True)


class Deleter:
    """Deletes superfluous checkpoints each time that another checkpoint becomes known-good.

    Until then an older checkpoint is the newest known-good checkpoint, and a rollback may need
    every checkpoint since.

    Args:
        policy: has the probation of a checkpoint and the region of a trouble.
        store: the store, which deletes in the background.
        log: the log, for the problem of a deletion.
        record: has the attempts, and how far checkpoints are known-good.
        ledger: has the rollbacks, and the index of the next step.
        known_checkpoints: hears of the checkpoints that were deleted or are damaged.

    Attributes:
        keep: the checkpoints to keep on disk.
    """

    def __init__(
        self,
        keep: Keep,
        *,
        policy: HostPolicy,
        store: CheckpointStore,
        log: RunLog,
        record: RunRecord,
        ledger: Ledger,
        known_checkpoints: KnownCheckpoints,
    ) -> None:
        self.keep = keep
        self._policy = policy
        self._store = store
        self._log = log
        self._record = record
        self._ledger = ledger
        self._known_checkpoints = known_checkpoints
        self._known_good_up_to = -1
        """`RunRecord.known_good_up_to` at the last deletion. It begins with the same value, -1."""
        self._results: deque[set[int] | Exception] = deque()
        """Results of the background: steps of deleted checkpoints, or the problem."""

    def begin_attempt(self, step: int) -> None:
        """Begins an attempt at a step, after which no checkpoint is known-good.

        Without this call, `queue_deletions` would delete nothing until the repeated steps have
        passed the newest checkpoint that was known-good before the rollback.

        Args:
            step: first step of the attempt, after a start or a rollback.
        """
        self.collect_results()
        self._known_good_up_to = min(self._known_good_up_to, step)

    def queue_deletions(self, step: int) -> None:
        """Queues the deletions that are due, if the save of `step` succeeds.

        A second rollback in the region of the last one must not use a checkpoint that became
        known-good later, so the targets there and the next older known-good one stay. The
        decision uses the attempts as saved, so that a restart knows the same known-good
        checkpoints. The newest of them is verified first. If it is damaged, nothing is deleted.
        """
        store, record = self._store, self._record
        if record.known_good_up_to <= self._known_good_up_to:
            return
        self._known_good_up_to = record.known_good_up_to
        stay = store.ring.protected | self._known_checkpoints.newer_than_start
        region = self._policy.rollback.region
        past = self._ledger.same_trouble(self._record.journal.next_step, region)
        targets = [each.checkpoint for each in past]  # a start after a stop takes the oldest one
        choose = partial(_choose, store, record.attempt_history, step, targets)

        def delete() -> None:
            try:
                chosen = run_on_first(store.ranks, partial(choose, self.keep, stay))
                if chosen.surplus and chosen.newest_good is not None:
                    store.verify(chosen.newest_good)
                for old in chosen.surplus:
                    with suppress(CheckpointNotFound):
                        store.delete(old)
                self._results.append(chosen.known)
            except Exception as error:
                self._results.append(error)

        store.submit(step, delete)

    def collect_results(self) -> None:
        """Reads the results of the deletions that have ended in the background. Does not wait.

        A deleted checkpoint leaves `KnownCheckpoints`. A damaged checkpoint is reported. Any other
        error becomes an event of the kind `problem`: a checkpoint that stays costs disk space, not
        the run.
        """
        while self._results:
            result = self._results.popleft()
            if isinstance(result, set):
                self._known_checkpoints.remove(result)
            elif isinstance(result, CheckpointDamaged):
                self._known_checkpoints.lose(result)
            else:
                step = self._record.journal.next_step
                self._log.event("problem", step=step, problem=str(result))


class _Chosen(NamedTuple):
    """What to delete."""

    surplus: list[int]
    """Steps of the checkpoints to delete."""
    known: set[int]
    """Steps of `surplus` that are not abandoned. `KnownCheckpoints` lists them."""
    newest_good: int | None
    """Step of the newest known-good checkpoint, which stays, or None."""


def _choose(
    store: CheckpointStore,
    attempts: AttemptHistory,
    step: int,
    targets: Sequence[int],
    keep: Keep,
    stay: Collection[int],
) -> _Chosen:
    """Chooses what to delete after the save of `step`: nothing if this save is not in the store.

    `targets` are those of the rollbacks in this region, oldest first. `stay` are steps that may be
    needed.
    """
    saves = attempts.with_status(store.checkpoints())
    saves = [saved for saved in saves if saved.path or not store.durable]
    if (step, len(attempts.starts)) not in {(saved.step, saved.attempt) for saved in saves}:
        return _Chosen([], set(), None)
    good = [saved.step for saved in saves if saved.status == "good"]
    needed = {*stay, *targets}
    if targets:
        needed.update([at for at in good if at < targets[-1]][-1:])
    surplus = superfluous(saves, keep, stay=needed)
    abandoned = {saved.step for saved in saves if saved.is_abandoned}
    return _Chosen(surplus, {*surplus} - abandoned, max(good, default=None))
