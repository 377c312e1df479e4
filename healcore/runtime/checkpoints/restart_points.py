"""The newest state on disk between two checkpoints, for the start after a kill.

Regular checkpoints are as far apart as the policy's probation: a rollback needs distance from the
trouble. A process that is killed between two of them would lose all steps since the last one, and a
short run everything. No rollback goes to a restart point, so that saving them changes no decision;
each is deleted once a newer checkpoint is on disk.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from healcore.runtime.checkpoints.background_verifier import BackgroundVerifier
from healcore.runtime.checkpoints.wait_limit import WaitLimit
from healcore.runtime.store import CheckpointStore, LastGoodKept, NotThere
from healcore.runtime.store.ranks import Ranks, agreed

_LEAST = 10
"""Steps between two restart points, at least, ..."""
_SHARE = 4
"""... and this part of the steps done: a kill costs at most a quarter of them."""
_SECONDS, _TIME_SHARE = 1.0, 0.02
"""What they may cost the run: that many seconds, and this share of its time."""


class RestartPoints:
    """The restart points of one run.

    Args:
        store: of the run. One in memory only has none: it ends with the process.
        every: steps between two, where a trainer saves that often; None: see `spread`.
        spread: whether the distance follows from the steps done.
        verifier: which deletes in the background.
        ranks: the processes of this run.
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
        """Whether one is due at a step; `newest` is the step of the last save of any kind."""
        if self._store.disk is None:
            return False
        if self._every is not None and step // self._every > newest // self._every:
            return True
        return self._spread and step - newest >= max(_LEAST, step // _SHARE)

    def save(self, step: int, state: Mapping[str, Any], healing: Mapping[str, Any]) -> bool:
        """Saves one; False if it was left out because it would cost too much time. Collective."""
        late = self._limit.used_up or self._limit.exceeded(self._store)
        if any(self._ranks.gather(late)):
            return False
        began = time.monotonic()
        self._store.save_on_disk(step, state, healing=healing)
        self._limit.spend(time.monotonic() - began)
        self.delete_older(step)
        self._steps.add(step)
        return True

    def keep(self, step: int) -> None:
        """Takes note that a regular checkpoint of this step is saved."""
        self._steps.discard(step)

    def clear(self) -> None:
        """Forgets them: the run has gone back, or starts, and its listing has those that count."""
        self._steps.clear()

    def delete_older(self, step: int) -> None:
        """Deletes those that a newer checkpoint on disk has replaced, in the background."""
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
                with suppress(NotThere, LastGoodKept):
                    tier.delete(each)
                self._steps.discard(each)

        self._verifier.submit(self._store, step, delete)
