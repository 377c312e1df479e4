"""A ring of snapshots in host memory: rollback within milliseconds, as long as the process lives.

Taking a snapshot costs one copy of the state. The copy goes into spare memory and takes its place
in the ring when it is complete and inspected, so whatever happens during it loses nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any

import numpy as np

from healcore.runtime.store import inspection, protocol, retention
from healcore.runtime.store.background import Background
from healcore.runtime.store.errors import (
    CheckpointDamaged,
    LastGoodKept,
    NotFinite,
    NotThere,
    SaveFailed,
    StoreError,
)
from healcore.runtime.store.inspection import Inspection
from healcore.runtime.store.protocol import Restored, Saved, Status
from healcore.runtime.store.retention import Keep
from healcore.runtime.store.snapshot import Block, Copier

SMALL = Keep(good=1, candidates=2, quarantined=0)
"""Three snapshots: one known-good, the next to be, and the newest."""
_WHERE = "memory"
_NOTHING_YET = Inspection({}, ())


@dataclass
class _Slot:
    """One snapshot in the ring."""

    step: int
    snapshot: Any
    healing: bytes | None
    created: float
    found: Inspection = _NOTHING_YET
    status: Status = "candidate"
    holders: int = 0
    """Readers that still use its memory."""
    dropped: bool = False


class MemoryStore:
    """Snapshots in host memory. Adapters make it with their `Copier`.

    Args:
        copier: the framework's.
        keep: how many snapshots of each kind stay. One more is being taken at times.
        nonfinite_ok: patterns of array names where NaN and Inf are meant.
    """

    def __init__(
        self,
        copier: Copier,
        keep: Keep = SMALL,
        *,
        nonfinite_ok: Collection[str] = (),
    ) -> None:
        self.keep = keep.checked()
        self.nonfinite_ok = tuple(nonfinite_ok)
        self._copier = copier
        self._ring: dict[int, _Slot] = {}
        self._spare: Any | None = None
        self._told: list[str] = []
        self._behind = Background("healcore-memory")
        self._lock = RLock()

    # -- the protocol ---------------------------------------------------------------------------

    def save(
        self, step: int, state: Mapping[str, Any], *, healing: Mapping[str, Any] | None = None
    ) -> None:
        """Copies the state; digests and the finite check follow in the background."""
        self._save(step, state, healing)

    def steps(self) -> list[Saved]:
        """The snapshots in the ring, ascending by step."""
        self._behind.join()
        with self._lock:
            return [self._saved(self._ring[step]) for step in sorted(self._ring)]

    def verify(self, step: int) -> Saved:
        """Recomputes the digest of every array."""
        with self._holding(step) as slot:
            name = inspection.first_difference(slot.snapshot.blocks(), slot.found.digests)
            if name is not None:
                raise _changed(step, name)
            return self._saved(slot)

    def restore(self, step: int, like: Mapping[str, Any]) -> Restored:
        """Copies the snapshot out, checking every digest on the way."""
        with self._holding(step) as slot:

            def copy(blocks: Sequence[Block]) -> list[np.ndarray]:
                digests = slot.found.digests
                return inspection.checked_copies(blocks, digests, lambda name: _changed(step, name))

            state = self._copier.give(slot.snapshot, like, copy)
            return Restored(state, None if slot.healing is None else json.loads(slot.healing))

    def mark(self, step: int, status: Status) -> None:
        """Sets the status; a newly good snapshot may push older ones out."""
        protocol.checked_status(status)
        self._behind.join()
        with self._lock:
            slot = self._slot(step)
            if status == "good" and slot.found.nonfinite:
                raise NotFinite(step, slot.found.nonfinite)
            slot.status = status
            self._thin()

    def delete(self, step: int) -> None:
        """Drops a snapshot, unless it is the last known-good one."""
        if retention.is_last_good(self.steps(), step):
            raise LastGoodKept(step)
        self.drop(step)

    def wait(self) -> None:
        """Waits for the background."""
        self._behind.wait()

    def failures(self) -> list[SaveFailed]:
        """Failures not told yet."""
        return self._behind.failures()

    def problems(self) -> list[str]:
        """Snapshots that were dropped as soon as they were taken, since the last call."""
        self._behind.join()
        told, self._told = self._told, []
        return told

    # -- beyond it ------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Host memory held now, the spare included."""
        self._behind.join()
        with self._lock:
            held = [slot.snapshot for slot in self._ring.values()]
            spare = [] if self._spare is None else [self._spare]
            return sum(snapshot.nbytes for snapshot in (*held, *spare))

    def describe(self, state_bytes: int | None = None) -> str:
        """The bound in words: "at most 4 copies of the state in host memory (960 MB)".

        Args:
            state_bytes: size of one copy, if there is no snapshot yet to tell it.
        """
        most = self.keep.most + 1
        sizes = [saved.bytes for saved in self.steps()]
        one = max(sizes, default=state_bytes or 0)
        size = f" ({most} × {one / 1e6:.0f} MB = {most * one / 1e6:.0f} MB)" if one else ""
        return (
            f"at most {most} copies of the state in host memory{size}: "
            f"{self.keep.good} known-good, {self.keep.candidates} on probation, "
            f"{self.keep.quarantined} quarantined, one being taken"
        )

    def drop(self, step: int) -> None:
        """`delete` without the question whether it is the last known-good one."""
        self._behind.join()
        with self._lock:
            self._slot(step)
            self._release(self._ring.pop(step))

    def save_and_hold(
        self, step: int, state: Mapping[str, Any], *, healing: Mapping[str, Any] | None = None
    ) -> Hold:
        """`save`, and a hold on the copy: this is how it gets from here to disk."""
        slot = self._save(step, state, healing, holders=1)
        return Hold(self, slot)

    # -- within ---------------------------------------------------------------------------------

    def _save(
        self,
        step: int,
        state: Mapping[str, Any],
        healing: Mapping[str, Any] | None,
        holders: int = 0,
    ) -> _Slot:
        step = protocol.checked_step(step)
        kept = None if healing is None else protocol.frozen(healing)
        self._behind.join()
        with self._lock:
            spare, self._spare = self._spare, None
        try:
            snapshot = self._copier.take(state, spare)
        except Exception as error:
            with self._lock:
                self._spare = spare
            if isinstance(error, StoreError):
                raise
            raise SaveFailed(step, "while copying the state", error) from error
        slot = _Slot(step, snapshot, kept, time.time(), holders=holders)
        self._behind.submit(step, "while copying the state", lambda: self._admit(slot))
        return slot

    def _admit(self, slot: _Slot) -> None:
        """The background's part: complete, inspect, put in the ring, let the superfluous go."""
        try:
            slot.snapshot.settle()
            slot.found = inspection.inspect(slot.snapshot.blocks(), self.nonfinite_ok)
        except BaseException:
            self._release(slot)
            raise
        with self._lock:
            replaced = self._ring.pop(slot.step, None)
            self._ring[slot.step] = slot
            if replaced is not None:
                self._release(replaced)
            self._thin()
            if slot.dropped:
                names = ", ".join(slot.found.nonfinite[:3])
                self._told.append(
                    f"the snapshot of step {slot.step} has NaN or Inf in {names} and was not kept"
                )

    def _thin(self) -> None:
        saves = [self._saved(slot) for slot in self._ring.values()]
        for step in retention.superfluous(saves, self.keep):
            self._release(self._ring.pop(step))

    def _release(self, slot: _Slot) -> None:
        """The slot is out of the ring; its memory is free when nobody reads it."""
        slot.dropped = True
        if not slot.holders:
            self._reclaim(slot.snapshot)

    def _reclaim(self, snapshot: Any) -> None:
        """Keeps one unused snapshot's memory for the next save, and lets further ones go."""
        with self._lock:
            if self._spare is None:
                self._spare = snapshot

    @contextmanager
    def _holding(self, step: int) -> Iterator[_Slot]:
        self._behind.join()
        with self._lock:
            slot = self._slot(step)
            slot.holders += 1
        try:
            yield slot
        finally:
            self._let_go(slot)

    def _let_go(self, slot: _Slot) -> None:
        with self._lock:
            slot.holders -= 1
            if slot.dropped and not slot.holders:
                self._reclaim(slot.snapshot)

    def _slot(self, step: int) -> _Slot:
        if step not in self._ring:
            raise NotThere(step, sorted(self._ring), _WHERE)
        return self._ring[step]

    def _saved(self, slot: _Slot) -> Saved:
        return Saved(
            step=slot.step,
            status=slot.status,
            finite=not slot.found.nonfinite,
            bytes=slot.snapshot.nbytes,
            created=slot.created,
            healing=slot.healing is not None,
            path=None,
            nonfinite=slot.found.nonfinite[:20],
        )


class Hold:
    """A snapshot that stays readable, in or out of the ring, until it is released."""

    def __init__(self, store: MemoryStore, slot: _Slot) -> None:
        self._store = store
        self._slot = slot

    def read(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """State and healing state in the snapshot's own memory: not to be changed.

        Raises:
            StoreError: the copy did not work out.
        """
        self._store._behind.join()
        slot = self._slot
        if slot.found is _NOTHING_YET:
            raise StoreError(f"the copy of step {slot.step} could not be completed")
        healing = None if slot.healing is None else json.loads(slot.healing)
        return self._store._copier.held(slot.snapshot), healing

    def release(self) -> None:
        """The snapshot is not needed any more."""
        self._store._let_go(self._slot)


def _changed(step: int, name: str) -> CheckpointDamaged:
    return CheckpointDamaged(step, _WHERE, name, "is not what was saved: its digest differs")
