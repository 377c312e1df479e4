"""A ring of snapshots in host memory: rollback within milliseconds, as long as the process lives.

Taking a snapshot costs one copy of the state. The copy goes into spare memory and takes its place
in the ring when it is complete and inspected, so whatever happens during it loses nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from rich.filesize import decimal

from healcore.runtime.store import inspection, protocol, retention
from healcore.runtime.store.background import Background
from healcore.runtime.store.errors import (
    CheckpointDamaged,
    LastGoodKept,
    NotFinite,
    SaveFailed,
    StoreError,
)
from healcore.runtime.store.protocol import Restored, Saved, Status
from healcore.runtime.store.retention import Keep
from healcore.runtime.store.ring import WHERE, Ring, Slot
from healcore.runtime.store.snapshot import Block, Copier

SMALL = Keep(good=1, candidates=2, quarantined=0)
"""Three snapshots: one known-good, the next to be, and the newest."""


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
        self.keep = keep
        self._copier = copier
        self._ring = Ring(keep, tuple(nonfinite_ok))
        self._behind = Background("healcore-memory")
        self._told: list[str] = []
        self._nonfinite: list[tuple[int, tuple[str, ...]]] = []

    # -- the protocol ---------------------------------------------------------------------------

    def save(
        self, step: int, state: Mapping[str, Any], *, healing: Mapping[str, Any] | None = None
    ) -> None:
        """Copies the state; digests and the finite check follow in the background."""
        self._save(step, state, healing)

    def steps(self) -> list[Saved]:
        """The snapshots in the ring, ascending by step."""
        return self._settled.saves()

    def verify(self, step: int) -> Saved:
        """Recomputes the digest of every array."""
        with self._settled.holding(step) as slot:
            name = inspection.first_difference(slot.snapshot.blocks(), _digests(slot))
            if name is not None:
                raise _changed(step, name)
            return slot.saved(self.nonfinite_ok)

    def restore(self, step: int, like: Mapping[str, Any]) -> Restored:
        """Copies the snapshot out, checking every digest on the way."""
        with self._settled.holding(step) as slot:

            def copy(blocks: Sequence[Block]) -> list[np.ndarray]:
                return inspection.checked_copies(
                    blocks, _digests(slot), lambda name: _changed(step, name)
                )

            state = self._copier.give(slot.snapshot, like, copy)
            return Restored(state, _healing(slot))

    def mark(self, step: int, status: Status) -> None:
        """Sets the status; a newly good snapshot may push older ones out."""
        protocol.checked_status(status)
        bad = self._settled.slot(step).saved(self.nonfinite_ok).nonfinite
        if status == "good" and bad:
            raise NotFinite(step, bad)
        self._ring.mark(step, status)

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
    def nonfinite_ok(self) -> tuple[str, ...]:
        """Patterns of array names where NaN and Inf are meant. May be set anew at any time."""
        return self._ring.nonfinite_ok

    @nonfinite_ok.setter
    def nonfinite_ok(self, patterns: Collection[str]) -> None:
        self._ring.nonfinite_ok = tuple(patterns)

    def nonfinite_in(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the arrays in a state that hold NaN or Inf, meant or not; saves nothing.

        Raises:
            UnsavableState: there is something in the state that cannot be saved.
        """
        snapshot = self._copier.take(state, self._settled.take_spare())
        try:
            snapshot.settle()
            return inspection.nonfinite(snapshot.blocks())
        finally:
            self._ring.reclaim(snapshot)  # the first save goes into it

    def nonfinite_found(self) -> list[tuple[int, tuple[str, ...]]]:
        """Saves with NaN or Inf where that is not meant, and in which arrays; each is told once."""
        self._behind.join()
        found, self._nonfinite = self._nonfinite, []
        return found

    def queues(self) -> list[tuple[MemoryStore, Background]]:
        """Itself, and the queue in which checkpoints are proven: behind the saves before it."""
        return [(self, self._behind)]

    @property
    def nbytes(self) -> int:
        """Host memory held now, the spare included."""
        return self._settled.nbytes

    def describe(self, state_bytes: int | None = None) -> str:
        """The bound in words: "at most 4 copies of the state in host memory (4 × 240 MB = …".

        Args:
            state_bytes: size of one copy, if there is no snapshot yet to tell it.
        """
        most = self.keep.most + 1
        one = max((saved.bytes for saved in self.steps()), default=state_bytes or 0)
        size = f" ({most} × {decimal(one)} = {decimal(most * one)})" if one else ""
        return (
            f"at most {most} copies of the state in host memory{size}: "
            f"{self.keep.good} known-good, {self.keep.candidates} on probation, "
            f"{self.keep.quarantined} quarantined, one being taken"
        )

    def drop(self, step: int) -> None:
        """`delete` without the question whether it is the last known-good one."""
        self._settled.drop(step)

    def save_and_hold(
        self, step: int, state: Mapping[str, Any], *, healing: Mapping[str, Any] | None = None
    ) -> Hold:
        """`save`, and a hold on the copy: this is how it gets from here to disk."""
        return Hold(self, self._save(step, state, healing, holders=1))

    # -- within ---------------------------------------------------------------------------------

    @property
    def _settled(self) -> Ring:
        """The ring, once the snapshot under way is in it."""
        self._behind.join()
        return self._ring

    def _save(
        self,
        step: int,
        state: Mapping[str, Any],
        healing: Mapping[str, Any] | None,
        holders: int = 0,
    ) -> Slot:
        step = protocol.checked_step(step)
        kept = None if healing is None else protocol.frozen(healing)
        spare = self._settled.take_spare()
        try:
            snapshot = self._copier.take(state, spare)
        except Exception as error:
            self._ring.reclaim(spare)
            if isinstance(error, StoreError):
                raise
            raise SaveFailed(step, "while copying the state", error) from error
        slot = Slot(step, snapshot, kept, time.time(), holders=holders)
        self._behind.submit(step, "while copying the state", lambda: self._admit(slot))
        return slot

    def _admit(self, slot: Slot) -> None:
        """The background's part: complete the copy, inspect it, put it in the ring."""
        try:
            slot.snapshot.settle()
            slot.found = inspection.inspect(slot.snapshot.blocks())
        except BaseException:
            self._ring.release(slot)
            raise
        bad = slot.saved(self.nonfinite_ok).nonfinite
        self._ring.admit(slot)
        if bad:
            self._nonfinite.append((slot.step, bad))
        if slot.dropped:
            names = ", ".join(bad[:3])
            self._told.append(
                f"the snapshot of step {slot.step} has NaN or Inf in {names} and was not kept"
            )


class Hold:
    """A snapshot that stays readable, in or out of the ring, until it is released."""

    def __init__(self, store: MemoryStore, slot: Slot) -> None:
        self._store = store
        self._slot = slot

    @property
    def created(self) -> float:
        """When it was copied."""
        return self._slot.created

    @created.setter
    def created(self, when: float) -> None:
        self._slot.created = when

    def read(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """State and healing state in the snapshot's own memory: not to be changed.

        Raises:
            StoreError: the copy did not work out.
        """
        self._store._behind.join()
        if self._slot.found is None:
            raise StoreError(f"the copy of step {self._slot.step} could not be completed")
        return self._store._copier.held(self._slot.snapshot), _healing(self._slot)

    def release(self) -> None:
        """The snapshot is not needed any more."""
        self._store._ring.let_go(self._slot)


def _digests(slot: Slot) -> dict[str, str]:
    assert slot.found is not None, "slots in the ring are inspected"
    return slot.found.digests


def _healing(slot: Slot) -> dict[str, Any] | None:
    return None if slot.healing is None else json.loads(slot.healing)


def _changed(step: int, name: str) -> CheckpointDamaged:
    return CheckpointDamaged(step, WHERE, name, "is not what was saved: its digest differs")
