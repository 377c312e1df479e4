"""Each rank sends a heartbeat every few seconds, and a rank that sends none is named."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from healcore.policy.faults import Hang
from healcore.runtime.hang_guard.alarm import listed
from healcore.runtime.store.ranks import Ranks


class RankHeartbeats(Protocol):
    """A number of each rank that counts up, and that all ranks can read without a collective.

    Its methods may wait for the process that holds the numbers, and raise when that has ended.
    """

    def beat(self, number: int) -> None:
        """Sets this rank's number."""
        ...

    def last(self, rank: int) -> int:
        """The number of a rank."""
        ...


class HealthProbe:
    """Counts up this rank's number, in a thread, and watches those of others.

    Rank 0 reports ranks whose number stands still for `probe_s` seconds, and rank 1 reports rank 0:
    the process is stopped or holds the GIL, or the machine or its network is gone. It depends on no
    step, because ranks that wait for that one in a collective take none.

    Args:
        rule: of the policy.
        ranks: of the run.
        heartbeats: of all ranks.
        report: takes a sentence, in another thread.
    """

    def __init__(
        self,
        rule: Hang,
        ranks: Ranks,
        heartbeats: RankHeartbeats,
        report: Callable[[str], None],
    ) -> None:
        self._rule, self._heartbeats, self._report = rule, heartbeats, report
        others = range(1, ranks.world) if ranks.rank == 0 else [0] if ranks.rank == 1 else []
        self._seen = {rank: (0, time.monotonic()) for rank in others}
        """Rank -> its last number, and when it was new."""
        self._late: set[int] = set()
        self._closed = threading.Event()
        # A daemon, and no collective: one that waits in gloo when the program ends aborts it.
        threading.Thread(target=self._run, name="healcore-health", daemon=True).start()

    def close(self) -> None:
        """Ends the thread, without waiting for it."""
        self._closed.set()

    def _run(self) -> None:
        number = 0
        try:
            while not self._closed.wait(self._rule.probe_every_s):
                number += 1
                self._heartbeats.beat(number)
                self._look()
        except Exception:
            return  # the process that holds the numbers has ended

    def _look(self) -> None:
        for rank, (before, _) in self._seen.items():
            number = self._heartbeats.last(rank)
            if number != before:
                self._seen[rank] = number, time.monotonic()
        now, patience = time.monotonic(), self._rule.probe_s + self._rule.probe_every_s
        late = {rank for rank, (_, new) in self._seen.items() if now - new > patience}
        if late - self._late and not self._closed.is_set():
            self._report(
                f"rank {listed(sorted(late))} has sent no heartbeat for {patience:g} s (the "
                "health probe): its process is stopped or held up, or its machine or network is "
                "gone"
            )
        self._late = late
