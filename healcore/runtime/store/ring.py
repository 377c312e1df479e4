"""The snapshots that a MemoryStore holds, who reads them, and whose memory is free."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any

from healcore.runtime import forking
from healcore.runtime.store import retention
from healcore.runtime.store.errors import NotThere
from healcore.runtime.store.inspection import Inspection, unmeant
from healcore.runtime.store.protocol import Saved, Status
from healcore.runtime.store.retention import Keep

WHERE = "memory"


@dataclass
class Slot:
    """One snapshot."""

    step: int
    snapshot: Any
    healing: bytes | None
    created: float
    found: Inspection | None = None
    """None until the copy is complete and inspected; it is not in the ring before."""
    status: Status = "candidate"
    holders: int = 0
    """Readers that still use its memory."""
    dropped: bool = False

    @property
    def nonfinite(self) -> tuple[str, ...]:
        """Arrays with NaN or Inf, meant or not."""
        return self.found.nonfinite if self.found else ()

    def saved(self, nonfinite_ok: Collection[str]) -> Saved:
        """As it is listed.

        Args:
            nonfinite_ok: patterns of array names where NaN and Inf are meant.
        """
        bad = unmeant(self.nonfinite, nonfinite_ok)
        return Saved(
            step=self.step,
            status=self.status,
            finite=not bad,
            bytes=self.snapshot.nbytes,
            created=self.created,
            healing=self.healing is not None,
            path=None,
            nonfinite=bad,
        )


class Ring:
    """Slots by step, never more than `keep` allows. From any thread.

    The memory of one snapshot that nobody needs any more is kept for the next.
    """

    def __init__(self, keep: Keep, nonfinite_ok: tuple[str, ...] = ()) -> None:
        self.keep = keep.checked()
        self.nonfinite_ok = nonfinite_ok
        """Patterns of array names where NaN and Inf are meant."""
        self._slots: dict[int, Slot] = {}
        self._beneath: Slot | None = None
        """The last known-good one while a newer save of its step is not proven. It takes a good
        one's place: there is no other."""
        self._spare: Any | None = None
        self._lock = RLock()
        forking.watch(self)

    def forked(self) -> None:
        """In a child: whoever held the lock is not there."""
        self._lock = RLock()

    def saves(self) -> list[Saved]:
        """What is in it, ascending by step."""
        with self._lock:
            return [self._slots[step].saved(self.nonfinite_ok) for step in sorted(self._slots)]

    @property
    def nbytes(self) -> int:
        """Memory held, the spare included."""
        with self._lock:
            beneath = [] if self._beneath is None else [self._beneath]
            held = [slot.snapshot for slot in (*self._slots.values(), *beneath)]
            spare = [] if self._spare is None else [self._spare]
            return sum(snapshot.nbytes for snapshot in (*held, *spare))

    def slot(self, step: int) -> Slot:
        """The snapshot of a step.

        Raises:
            NotThere: there is none.
        """
        with self._lock:
            if step not in self._slots:
                raise NotThere(step, sorted(self._slots), WHERE)
            return self._slots[step]

    def admit(self, slot: Slot) -> None:
        """Puts a snapshot in, in place of one of the same step; superfluous ones go.

        It may be superfluous itself: `slot.dropped` tells.
        """
        with self._lock:
            replaced = self._slots.pop(slot.step, None)
            self._slots[slot.step] = slot
            if replaced is not None and replaced.status == "good" and not self._good():
                self._beneath = replaced
            elif replaced is not None:
                self.release(replaced)
            self._thin()

    def mark(self, step: int, status: Status) -> None:
        """Sets a status. One more that is good may push older ones out."""
        with self._lock:
            self.slot(step).status = status
            self._thin()

    def drop(self, step: int) -> None:
        """Takes a snapshot out."""
        with self._lock:
            self.slot(step)
            self.release(self._slots.pop(step))
            self._settle()

    # -- memory ---------------------------------------------------------------------------------

    def take_spare(self) -> Any | None:
        """A snapshot whose memory may be overwritten, if there is one."""
        with self._lock:
            spare, self._spare = self._spare, None
            return spare

    def reclaim(self, snapshot: Any | None) -> None:
        """Keeps unused memory for the next snapshot; if there is some already, lets it go."""
        with self._lock:
            if self._spare is None:
                self._spare = snapshot

    def release(self, slot: Slot) -> None:
        """A slot is not in the ring (any more): its memory is free when nobody reads it."""
        with self._lock:
            slot.dropped = True
            if not slot.holders:
                self.reclaim(slot.snapshot)

    @contextmanager
    def holding(self, step: int) -> Iterator[Slot]:
        """The snapshot of a step, whose memory stays as it is until the end of the block."""
        with self._lock:
            slot = self.slot(step)
            slot.holders += 1
        try:
            yield slot
        finally:
            self.let_go(slot)

    def let_go(self, slot: Slot) -> None:
        """One reader less."""
        with self._lock:
            slot.holders -= 1
            if slot.dropped and not slot.holders:
                self.reclaim(slot.snapshot)

    def _thin(self) -> None:
        for step in retention.superfluous(self.saves(), self.keep):
            self.release(self._slots.pop(step))
        self._settle()

    def _settle(self) -> None:
        """The one beneath comes back when the newer save proves bad, or goes when one is good."""
        beneath = self._beneath
        if beneath is None:
            return
        above = self._slots.get(beneath.step)
        if self._good():
            self._beneath = None
            self.release(beneath)
        elif above is None or above.status == "quarantined":
            self._beneath = None
            self._slots[beneath.step] = beneath
            if above is not None:
                self.release(above)

    def _good(self) -> bool:
        return any(slot.status == "good" for slot in self._slots.values())
