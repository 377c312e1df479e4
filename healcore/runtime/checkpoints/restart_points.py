"""Restart points: saves between two checkpoints, for the start after a kill.

Regular checkpoints are as far apart as the policy's probation, because a rollback needs distance
from the trouble. Without restart points a killed process would lose all steps since the last
checkpoint. No rollback uses a restart point, so they change no decision. Each is deleted once a
newer checkpoint is on disk.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from healcore.runtime.checkpoints.background_verifier import BackgroundVerifier
from healcore.runtime.store import CheckpointNotFound, CheckpointStore, LastGoodKept
from healcore.runtime.store.ranks import Ranks, agreed

_LEAST = 10
"""Least number of steps between two restart points."""
_SHARE = 4
"""The distance is also at least 1 / `_SHARE` of the steps done: a kill costs a quarter of them."""
_SECONDS, _TIME_SHARE = 1.0, 0.02
"""Time that restart points may cost: seconds, and a share of the run's time."""


class WaitLimit:
    """Time that all saves together may cost: `seconds`, and a share of the run's time.

    The time is not refunded when the disk keeps up: otherwise every other save would wait as long
    as the first.
    """

    def __init__(self, seconds: float, share: float) -> None:
        self._seconds = seconds
        self._share = share
        self._began = time.monotonic()
        self._used = 0.0

    def wait_until_deadline(self, store: CheckpointStore) -> bool:
        """Waits for the previous save. Returns True if it is not written when the time is up."""
        began = time.monotonic()
        left = self._seconds + self._share * (began - self._began) - self._used
        while (busy := store.busy) and time.monotonic() < began + left:
            time.sleep(0.001)
        self._used += time.monotonic() - began
        return busy

    def spend(self, seconds: float) -> None:
        """Adds the time that a save itself has taken."""
        self._used += seconds

    @property
    def used_up(self) -> bool:
        """Whether no time is left."""
        return self._used > self._seconds + self._share * (time.monotonic() - self._began)


class RestartPoints:
    """The restart points of one run. A store in memory only has none.

    Args:
        store: of the run.
        every: steps between two restart points, or None.
        spread: whether the distance follows from the steps done.
        verifier: deletes in the background.
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
        self._limit = WaitLimit(_SECONDS, _TIME_SHARE)
        self._steps: set[int] = set()

    def due(self, step: int, newest: int) -> bool:
        """Whether to save at a step; `newest` is the step of the last save of any kind."""
        if self._store.disk is None:
            return False
        if self._every is not None and step // self._every > newest // self._every:
            return True
        return self._spread and step - newest >= max(_LEAST, step // _SHARE)

    def save(self, step: int, state: Mapping[str, Any], healing: Mapping[str, Any]) -> bool:
        """Saves; returns False if that would cost too much time. Collective."""
        late = self._limit.used_up or self._limit.wait_until_deadline(self._store)
        if any(self._ranks.gather(late)):
            return False
        began = time.monotonic()
        self._store.save_on_disk(step, state, healing=healing)
        self._limit.spend(time.monotonic() - began)
        self.delete_older(step)
        self._steps.add(step)
        return True

    def keep(self, step: int) -> None:
        """Records that the save of this step is a regular checkpoint."""
        self._steps.discard(step)

    def clear(self) -> None:
        """Forgets all restart points, at a start and after a rollback."""
        self._steps.clear()

    def delete_older(self, step: int) -> None:
        """Deletes restart points older than a checkpoint on disk, in the background."""
        steps = frozenset(self._steps)
        if not steps:
            return

        def delete(tier: CheckpointStore) -> None:
            saves = tier.steps()
            usable = [each.step for each in saves if each.finite and each.status != "quarantined"]
            old = [
                each.step
                for each in saves
                if each.step in steps and each.step < max(usable, default=0)
            ]
            for each in agreed(tier.processes, old):
                with suppress(CheckpointNotFound, LastGoodKept):
                    tier.delete(each)
                self._steps.discard(each)

        self._verifier.submit(self._store, step, delete)
