"""A ring of snapshots in host memory: rollback within milliseconds, as long as the process lives.

Taking a snapshot costs one copy of the state. The copy goes into spare memory and enters the ring
when it is complete and inspected, so a failure during the copy loses nothing.
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
from rich.filesize import decimal

from healcore.runtime.events import fork_safety
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
WHERE = "memory"


@dataclass
class Slot:
    """One snapshot."""

    step: int
    snapshot: Any
    healing: bytes | None
    created: float
    found: Inspection | None = None
    """None until the copy is complete and inspected. Only then the slot enters the ring."""
    status: Status = "candidate"
    holders: int = 0
    """Readers that still use its memory."""
    dropped: bool = False

    @property
    def digests(self) -> dict[str, str]:
        """Key of a block -> digest."""
        assert self.found is not None, "slots in the ring are inspected"
        return self.found.digests

    @property
    def healing_state(self) -> dict[str, Any] | None:
        """A fresh copy of the healing state."""
        return None if self.healing is None else json.loads(self.healing)

    def saved(self, nonfinite_ok: Collection[str]) -> Saved:
        """The slot as `steps` lists it; `nonfinite_ok` are the patterns of allowed array names."""
        bad = inspection.disallowed(self.found.nonfinite if self.found else (), nonfinite_ok)
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


class SnapshotStore:
    """Snapshots in host memory: as many as `keep` allows, and one more during a save.

    The memory of one snapshot that nobody needs any more is kept for the next.
    """

    def __init__(
        self, copier: Copier, keep: Keep = SMALL, *, nonfinite_ok: Collection[str] = ()
    ) -> None:
        self.protected: frozenset[int] = frozenset()
        """Steps of snapshots that stay in addition."""
        self.keep = keep.checked()
        self.nonfinite_ok = tuple(nonfinite_ok)
        """Patterns of array names where NaN and Inf are allowed. May be changed at any time."""
        self._copier = copier
        self._slots: dict[int, Slot] = {}
        self._superseded: Slot | None = None
        """The last known-good one while a newer save of its step is not verified. It takes a good
        one's place: there is no other."""
        self._spare: Any | None = None
        self._lock = RLock()
        self._behind = Background("healcore-memory")
        self._problems: list[str] = []
        self._nonfinite: list[tuple[int, tuple[str, ...]]] = []
        fork_safety.watch(self)

    def forked(self) -> None:
        """In a child the thread that held the lock does not exist."""
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
        return self._listed()

    def verify(self, step: int) -> Saved:
        """Recomputes the digest of every array."""
        with self._reading(step) as slot:
            name = inspection.first_changed(slot.snapshot.blocks(), slot.digests)
            if name is not None:
                raise _changed(step, name)
            return slot.saved(self.nonfinite_ok)

    def restore(self, step: int, like: Mapping[str, Any]) -> Restored:
        """Copies the snapshot, verifying every digest during the copy."""
        with self._reading(step) as slot:

            def copy(blocks: Sequence[Block]) -> list[np.ndarray]:
                return inspection.checked_copies(
                    blocks, slot.digests, lambda name: _changed(step, name)
                )

            return Restored(self._copier.give(slot.snapshot, like, copy), slot.healing_state)

    def mark(self, step: int, status: Status) -> None:
        """Sets the status; a newly good snapshot may push older ones out."""
        protocol.checked_status(status)
        self._behind.join()
        bad = self._slot(step).saved(self.nonfinite_ok).nonfinite
        if status == "good" and bad:
            raise NotFinite(step, bad)
        with self._lock:
            self._slot(step).status = status
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
        """Failures since the last call."""
        return self._behind.failures()

    def problems(self) -> list[str]:
        """Snapshots that were dropped as soon as they were taken, since the last call."""
        self._behind.join()
        found, self._problems = self._problems, []
        return found

    # -- beyond it ------------------------------------------------------------------------------

    def nonfinite_in(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the arrays in a state that hold NaN or Inf, allowed or not; saves nothing."""
        snapshot = self._copier.take(state, self._take_spare())
        try:
            snapshot.settle()
            return inspection.nonfinite(snapshot.blocks())
        finally:
            self._reclaim(snapshot)  # the first save goes into it

    def nonfinite_found(self) -> list[tuple[int, tuple[str, ...]]]:
        """Saves since the last call with NaN or Inf that is not allowed, and the array names."""
        self._behind.join()
        found, self._nonfinite = self._nonfinite, []
        return found

    def queues(self) -> list[tuple[SnapshotStore, Background]]:
        """Itself, and the queue in which checkpoints are verified, after the saves before them."""
        return [(self, self._behind)]

    @property
    def nbytes(self) -> int:
        """Host memory held now, the spare included."""
        self._behind.join()
        with self._lock:
            slots = [*self._slots.values(), self._superseded]
            held = [*(slot.snapshot for slot in slots if slot is not None), self._spare]
            return sum(snapshot.nbytes for snapshot in held if snapshot is not None)

    def describe(self, state_bytes: int | None = None) -> str:
        """The bound as text: "at most 4 copies of the state in host memory (4 × 240 MB = …"."""
        most = self.keep.most + 1
        one = max((saved.bytes for saved in self.steps()), default=state_bytes or 0)
        size = f" ({most} × {decimal(one)} = {decimal(most * one)})" if one else ""
        return f"at most {most} copies of the state in host memory{size}"

    def drop(self, step: int) -> None:
        """`delete`, even of the last known-good one."""
        self._behind.join()
        with self._lock:
            self._slot(step)
            self._release(self._slots.pop(step))
            self._resolve_superseded()

    def save_and_hold(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        healing: Mapping[str, Any] | None = None,
        in_ring: bool = True,
    ) -> Slot:
        """`save`; the copy stays readable, in or out of the ring, until `end_hold`."""
        return self._save(step, state, healing, holders=1, in_ring=in_ring)

    def read_held(self, slot: Slot) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """State and healing state, in the snapshot's own memory: not to be changed.

        StoreError if the copy failed.
        """
        self._behind.join()
        if slot.found is None:
            raise StoreError(f"the copy of step {slot.step} could not be completed")
        return self._copier.held(slot.snapshot), slot.healing_state

    def end_hold(self, slot: Slot) -> None:
        """Ends one hold of a slot."""
        with self._lock:
            slot.holders -= 1
            if slot.dropped and not slot.holders:
                self._reclaim(slot.snapshot)

    # -- within ---------------------------------------------------------------------------------

    def _save(
        self,
        step: int,
        state: Mapping[str, Any],
        healing: Mapping[str, Any] | None,
        holders: int = 0,
        in_ring: bool = True,
    ) -> Slot:
        step = protocol.checked_step(step)
        kept = None if healing is None else protocol.frozen(healing)
        spare = self._take_spare()
        try:
            snapshot = self._copier.take(state, spare)
        except Exception as error:
            self._reclaim(spare)
            if isinstance(error, StoreError):
                raise
            raise SaveFailed(step, "while copying the state", error) from error
        slot = Slot(step, snapshot, kept, time.time(), holders=holders)
        self._behind.submit(step, "while copying the state", lambda: self._admit(slot, in_ring))
        return slot

    def _admit(self, slot: Slot, in_ring: bool) -> None:
        """In the background: completes and inspects the copy, then puts it into the ring."""
        try:
            slot.snapshot.settle()
            slot.found = inspection.inspect(slot.snapshot.blocks())
        except BaseException:
            self._release(slot)
            raise
        bad = slot.saved(self.nonfinite_ok).nonfinite
        if bad:
            self._nonfinite.append((slot.step, bad))
        if not in_ring:
            self._release(slot)
            return
        with self._lock:
            replaced = self._slots.pop(slot.step, None)
            self._slots[slot.step] = slot
            if replaced is not None and replaced.status == "good" and not self._has_good():
                self._superseded = replaced
            elif replaced is not None:
                self._release(replaced)
            self._thin()
        if slot.dropped:
            names = ", ".join(bad[:3])
            self._problems.append(
                f"the snapshot of step {slot.step} has NaN or Inf in {names} and was not kept"
            )

    def _listed(self) -> list[Saved]:
        with self._lock:
            return [self._slots[step].saved(self.nonfinite_ok) for step in sorted(self._slots)]

    def _slot(self, step: int) -> Slot:
        with self._lock:
            if step not in self._slots:
                raise NotThere(step, sorted(self._slots), WHERE)
            return self._slots[step]

    @contextmanager
    def _reading(self, step: int) -> Iterator[Slot]:
        """The snapshot of a step. Its memory stays as it is until the end of the block."""
        self._behind.join()
        with self._lock:
            slot = self._slot(step)
            slot.holders += 1
        try:
            yield slot
        finally:
            self.end_hold(slot)

    def _take_spare(self) -> Any | None:
        """A snapshot whose memory may be overwritten, if there is one."""
        self._behind.join()
        with self._lock:
            spare, self._spare = self._spare, None
            return spare

    def _reclaim(self, snapshot: Any | None) -> None:
        """Keeps unused memory for the next snapshot; frees it if there is some already."""
        with self._lock:
            if self._spare is None:
                self._spare = snapshot

    def _release(self, slot: Slot) -> None:
        """Takes note that a slot is not in the ring; its memory is free once nobody reads it."""
        with self._lock:
            slot.dropped = True
            if not slot.holders:
                self._reclaim(slot.snapshot)

    def _thin(self) -> None:
        for step in retention.superfluous(self._listed(), self.keep):
            if step not in self.protected:
                self._release(self._slots.pop(step))
        self._resolve_superseded()

    def _resolve_superseded(self) -> None:
        """Puts the superseded save back if the newer one is bad; drops it once one is good."""
        old = self._superseded
        if old is None:
            return
        newer = self._slots.get(old.step)
        if self._has_good():
            self._superseded = None
            self._release(old)
        elif newer is None or newer.status == "quarantined":
            self._superseded = None
            self._slots[old.step] = old
            if newer is not None:
                self._release(newer)

    def _has_good(self) -> bool:
        return any(slot.status == "good" for slot in self._slots.values())


def _changed(step: int, name: str) -> CheckpointDamaged:
    return CheckpointDamaged(step, WHERE, name, "is not what was saved: its digest differs")
