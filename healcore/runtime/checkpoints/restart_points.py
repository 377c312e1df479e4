"""Restart points: saves between two checkpoints, for the start after a kill.

Regular checkpoints are as far apart as the policy's probation, because a rollback needs distance
from the trouble. Without restart points a killed process would lose all steps since the last
checkpoint. No rollback uses a restart point, so they change no decision. A restart point is deleted
once a newer checkpoint is on disk.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from healcore.runtime.checkpoints.background_verifier import BackgroundVerifier
from healcore.runtime.store import CheckpointNotFound, CheckpointStore, LastGoodKept
from healcore.runtime.store.ranks import Ranks, agreed

_MIN_DISTANCE = 10
"""Least number of steps between two restart points."""
_SHARE = 4
"""The distance is also at least 1 / `_SHARE` of the steps done: a kill costs a quarter of them."""
_SECONDS, _TIME_SHARE = 1.0, 0.02
"""Time that restart points may cost: seconds, plus a share of the run's time."""


class TimeBudget:
    """Time that all saves together may cost: `seconds`, plus a share of the run's time.

    Time is not refunded when the disk keeps up: otherwise every second save would wait as long as
    the first.
    """

    def __init__(self, seconds: float, share: float) -> None:
        self._seconds = seconds
        self._share = share
        self._began = time.monotonic()
        self._used = 0.0

    def wait_until_deadline(self, store: CheckpointStore) -> bool:
        """Waits for the previous save. Returns True if the time is up before it is written."""
        began = time.monotonic()
        remaining = self._seconds + self._share * (began - self._began) - self._used
        while (busy := store.busy) and time.monotonic() < began + remaining:
            time.sleep(0.001)
        self._used += time.monotonic() - began
        return busy

    def spend(self, seconds: float) -> None:
        """Subtracts the time of a save."""
        self._used += seconds

    @property
    def exhausted(self) -> bool:
        """Whether all time is used."""
        return self._used > self._seconds + self._share * (time.monotonic() - self._began)


class RestartPoints:
    """The restart points of one run. A store without a disk has none.

    Args:
        store: store of the run.
        every: steps between two restart points, or None.
        spread: whether the distance grows with the number of steps done.
        verifier: deletes restart points in the background.
        ranks: the processes of the run.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        every: int | None,
        spread: bool,
        verifier: BackgroundVerifier,
        ranks: Ranks,
    ) -> None:
        self._store = store
        self._every = every
        self._spread = spread
        self._verifier = verifier
        self._ranks = ranks
        self._budget = TimeBudget(_SECONDS, _TIME_SHARE)
        self._steps: set[int] = set()

    def due(self, step: int, newest: int) -> bool:
        """Whether to save at a step; `newest` is the step of the last save of any kind."""
        if self._store.disk is None:
            return False
        if self._every is not None and step // self._every > newest // self._every:
            return True
        return self._spread and step - newest >= max(_MIN_DISTANCE, step // _SHARE)

    def save(self, step: int, state: Mapping[str, Any], healing: Mapping[str, Any]) -> bool:
        """Saves a restart point unless it would cost too much time. Returns whether it saved.

        Collective.
        """
        late = self._budget.exhausted or self._budget.wait_until_deadline(self._store)
        if any(self._ranks.gather(late)):
            return False
        began = time.monotonic()
        self._store.save_on_disk(step, state, healing=healing)
        self._budget.spend(time.monotonic() - began)
        self.delete_older(step)
        self._steps.add(step)
        return True

    def keep(self, step: int) -> None:
        """Records that the save of a step is a regular checkpoint, which is not deleted here."""
        self._steps.discard(step)

    def clear(self) -> None:
        """Forgets all restart points, after a start or a rollback."""
        self._steps.clear()

    def delete_older(self, step: int) -> None:
        """Deletes restart points older than a checkpoint on disk, in the background."""
        steps = frozenset(self._steps)
        if not steps:
            return

        def delete(tier: CheckpointStore) -> None:
            saves = tier.steps()
            usable = [s.step for s in saves if s.finite and s.status != "quarantined"]
            newest = max(usable, default=0)
            old = [s.step for s in saves if s.step in steps and s.step < newest]
            for old_step in agreed(tier.processes, old):
                with suppress(CheckpointNotFound, LastGoodKept):
                    tier.delete(old_step)
                self._steps.discard(old_step)

        self._verifier.submit(self._store, step, delete)
