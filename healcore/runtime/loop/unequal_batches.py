"""Ranks whose loaders have different numbers of batches, so that the others wait for one in a step.

A rank without another batch leaves its loop, and nothing that is sent in a step reaches it any
more. So each rank has a thread that looks every few seconds whether another one has completed. If
this rank has taken a batch more, or waits for the others within its step, and its training thread
stands in one call, it says so. Then the rank that has completed ends the run as a rank that raises
does, see `end_of_ranks`.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

from healcore.runtime.driver import Rendezvous

LOOK_S = 2.0
"""Seconds between two looks, ..."""
_LOOKS = 3
"""... and how many of them find the training thread at the same place."""
_PAUSE_S = (0.005, 0.5)
"""Seconds between two looks of a rank that has completed, at first and at most."""

_COMPLETED, _WAITS = "completed", "waits"


class Progress(NamedTuple):
    """How far a rank has come; one that has come further has taken more batches."""

    steps: int
    batches: int
    """From the loader in use, since the last step."""
    rank: int
    in_step: bool = False
    """Whether the loop has a batch in hand: it has not ended."""


class UnequalBatches:
    """Looks, in a thread, whether this rank waits for one that has completed.

    Args:
        rendezvous: of the ranks.
        progress: a method of the run, how far this rank has come.
    """

    def __init__(self, rendezvous: Rendezvous, progress: Callable[[], Progress]) -> None:
        self._rendezvous = rendezvous
        # The thread must not keep a run alive that nothing else refers to.
        self._progress = weakref.WeakMethod(progress)
        self._training = threading.get_ident()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="healcore-unequal", daemon=True).start()

    def close(self) -> None:
        """Ends the thread, without waiting for it."""
        self._closed.set()

    def _now(self) -> Progress | None:
        progress = self._progress()
        return None if progress is None else progress()

    def found(self) -> str:
        """Waits until all ranks have completed; which ones have more batches instead, or "".

        Called by a rank that has completed. "" also if another rank has ended in another way.
        """
        rendezvous, mine = self._rendezvous, self._now()
        pause, longest = _PAUSE_S
        self.close()
        assert mine is not None
        try:
            rendezvous.put(_COMPLETED, mine)
            everyone = rendezvous.world
            while rendezvous.count(_COMPLETED) < everyone:
                if rendezvous.posted() or not rendezvous.connected():
                    return ""
                waits: Progress | None = rendezvous.last(_WAITS)
                if waits is not None:
                    return (
                        f"its loop has ended, and rank {waits.rank} has begun another step: give "
                        "every rank as many batches (torch's DistributedSampler does, or "
                        "itertools.islice), and leave the loop at the same step on all"
                    )
                time.sleep(pause)
                pause = min(2 * pause, longest)
        except RuntimeError:  # the others cannot be reached: what follows says so
            return ""
        return ""

    def _run(self) -> None:
        before, looks = None, 0
        while not self._closed.wait(LOOK_S):
            try:
                completed: Progress | None = self._rendezvous.last(_COMPLETED)
                if completed is None:
                    continue
                mine, frame = self._now(), sys._current_frames().get(self._training)
                if mine is None:
                    return
                # In JAX steps are dispatched before the others have taken part in them.
                ahead = mine.steps > completed.steps + completed.batches
                ahead |= mine.batches > 0 and mine[:2] > completed[:2]
                # The other one may have left its loop within the step that this one is in.
                here = mine.in_step and mine.batches > 0 and mine[:2] >= completed[:2]
                ahead |= here and frame is not None and self._rendezvous.in_collective(frame)
                now = (mine, id(frame), frame.f_lasti) if ahead and frame is not None else None
                looks = looks + 1 if now is not None and now == before else 1
                before = now
                if now is not None and looks >= _LOOKS:
                    self._rendezvous.put(_WAITS, mine)
                    return
            except RuntimeError:
                return  # the process that held the store has ended
