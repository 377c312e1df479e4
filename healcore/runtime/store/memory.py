"""A ring of copies in host memory, for a rollback within milliseconds.

Saving costs one copy of the state. The copy goes into spare memory and enters the ring when it is
complete and inspected, so a failure during the copy loses nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import RLock
from typing import Any

import numpy as np
from rich.filesize import decimal

from healcore.events import fork_safety
from healcore.runtime.store import inspection, retention
from healcore.runtime.store.background import Background
from healcore.runtime.store.copies import Copier, StateCopy
from healcore.runtime.store.errors import CheckpointDamaged, NotThere, StoreError
from healcore.runtime.store.host_memory import Block
from healcore.runtime.store.protocol import Restored, Saved, Status
from healcore.runtime.store.retention import Keep
from healcore.runtime.store.tier import Tier

SMALL = Keep(good=1, candidates=2, quarantined=0)
"""One known-good copy, the next known-good one, and the newest."""
WHERE = "memory"


class SnapshotStore(Tier):
    """Copies in host memory: as many as `keep` allows, and one more during a save."""

    durable = False

    def __init__(
        self, copier: Copier, keep: Keep = SMALL, *, nonfinite_ok: Collection[str] = ()
    ) -> None:
        super().__init__(WHERE, copier, nonfinite_ok)
        self.keep = keep.checked()
        self._ring: dict[int, StateCopy] = {}
        self._lock = RLock()
        self._problems: list[str] = []
        fork_safety.watch(self)

    def forked(self) -> None:
        """In a child the thread that held the lock does not exist."""
        self._lock = RLock()

    @property
    def queue(self) -> Background:
        """Checkpoints are verified after the saves before them."""
        return self._saves

    # -- the protocol ---------------------------------------------------------------------------

    def save(
        self, step: int, state: Mapping[str, Any], *, healing: Mapping[str, Any] | None = None
    ) -> None:
        """Copies the state; digests and the finite check follow in the background."""
        self.release(self.hold(step, state, healing))

    def steps(self) -> list[Saved]:
        """The copies in the ring, ascending by step."""
        self.join()
        return self._listed()

    def verify(self, step: int) -> Saved:
        """Recomputes the digest of every array."""
        with self.reading(step) as copy:
            name = inspection.first_changed(copy.snapshot.blocks(), copy.digests)
            if name is not None:
                raise _changed(step, name)
            return self._as_saved(copy)

    def restore(self, step: int, like: Mapping[str, Any]) -> Restored:
        """Copies the arrays, verifying every digest during the copy."""
        with self.reading(step) as copy:

            def verified(blocks: Sequence[Block]) -> list[np.ndarray]:
                return inspection.checked_copies(
                    blocks, copy.digests, lambda name: _changed(step, name)
                )

            return Restored(self.copier.give(copy.snapshot, like, verified), copy.healing_state)

    def drop(self, step: int) -> None:
        """`delete`, even of the last known-good checkpoint."""
        self.join()
        with self._lock:
            self._find(step)
            self._remove(self._ring.pop(step))

    def take_out(self, step: int, *, copied: bool = False) -> None:
        """Drops a damaged copy if another tier has the checkpoint, else quarantines it."""
        if not copied:
            super().take_out(step)
        else:
            with suppress(StoreError):
                self.drop(step)

    def problems(self) -> list[str]:
        """Copies that were dropped as soon as they were taken, since the last call."""
        self.join()
        found, self._problems = self._problems, []
        return found

    def nonfinite_found(self) -> list[tuple[int, tuple[str, ...]]]:
        """Saves since the last call with NaN or Inf that is not allowed, and the array names."""
        self.join()
        return super().nonfinite_found()

    def describe(self, state_bytes: int | None = None) -> str:
        """The bound as text: "at most 4 copies of the state in host memory (4 × 240 MB = …"."""
        most = self.keep.most + 1
        one = max((saved.bytes for saved in self.steps()), default=state_bytes or 0)
        size = f" ({most} × {decimal(one)} = {decimal(most * one)})" if one else ""
        return f"at most {most} copies of the state in host memory{size}"

    # -- beyond the protocol --------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held now, including the memory kept for the next copy."""
        self.join()
        with self._lock:
            held = sum(copy.snapshot.nbytes for copy in self._ring.values())
            return held + self.copier.spare_bytes

    def hold(
        self,
        step: int,
        state: Mapping[str, Any],
        healing: Mapping[str, Any] | None = None,
        *,
        in_ring: bool = True,
    ) -> StateCopy:
        """`save`; the copy stays readable, in or out of the ring, until `release`."""
        self.join()  # a copy that leaves the ring lends its memory
        copy = self.copier.copy(step, state, healing)
        copy.holders, copy.dropped = 2, not in_ring  # held by `_admit` and by the caller
        copy.inspecting = self._saves.submit(
            copy.step, "while copying the state", lambda: self._admit(copy)
        )
        return copy

    def release(self, copy: StateCopy) -> None:
        """Ends one hold of a copy."""
        with self._lock:
            copy.holders -= 1
            if copy.dropped and not copy.holders:
                self.copier.release(copy)

    @contextmanager
    def reading(self, step: int) -> Iterator[StateCopy]:
        """The copy of a step. Its memory does not change until the end of the block."""
        self.join()
        with self._lock:
            copy = self._find(step)
            copy.holders += 1
        try:
            yield copy
        finally:
            self.release(copy)

    # -- within ---------------------------------------------------------------------------------

    def _admit(self, copy: StateCopy) -> None:
        """In the background: completes and inspects the copy, then puts it into the ring."""
        try:
            copy.snapshot.settle()
            copy.found = inspection.inspect(copy.snapshot.blocks())
            bad = self._as_saved(copy).nonfinite
            if bad:
                self._nonfinite.append((copy.step, bad))
            if not copy.dropped:
                self._enter(copy)
                if copy.dropped:
                    names = ", ".join(bad[:3])
                    self._problems.append(
                        f"the copy of step {copy.step} in memory has NaN or Inf in {names} and "
                        "was not kept"
                    )
        except BaseException:
            copy.dropped = True
            raise
        finally:
            self.release(copy)

    def _enter(self, copy: StateCopy) -> None:
        """Puts a copy into the ring, which may push others out, or the copy itself."""
        with self._lock:
            replaced = self._ring.pop(copy.step, None)
            if replaced is not None:
                self._remove(replaced)
            self._ring[copy.step] = copy
            self._thin()

    def _as_saved(self, copy: StateCopy) -> Saved:
        bad = inspection.disallowed(copy.found.nonfinite if copy.found else (), self.nonfinite_ok)
        return Saved(
            step=copy.step,
            status=copy.status,
            finite=not bad,
            bytes=copy.snapshot.nbytes,
            created=copy.created,
            healing=copy.healing is not None,
            path=None,
            nonfinite=bad,
        )

    def _listed(self) -> list[Saved]:
        with self._lock:
            return [self._as_saved(self._ring[step]) for step in sorted(self._ring)]

    def _find(self, step: int) -> StateCopy:
        with self._lock:
            if step not in self._ring:
                raise NotThere(step, sorted(self._ring), WHERE)
            return self._ring[step]

    def _saved(self, step: int) -> tuple[int, Saved]:
        self.join()
        return step, self._as_saved(self._find(step))

    def _set_status(self, found: int, status: Status) -> None:
        with self._lock:
            self._find(found).status = status
            self._thin()  # a newly good copy may push older copies out

    def _remove(self, copy: StateCopy) -> None:
        """Records that a copy has left the ring; its memory is free once nobody reads it."""
        with self._lock:
            copy.dropped = True
            if not copy.holders:
                self.copier.release(copy)

    def _thin(self) -> None:
        for step in retention.superfluous(self._listed(), self.keep):
            if step not in self.protected:
                self._remove(self._ring.pop(step))


def _changed(step: int, name: str) -> CheckpointDamaged:
    return CheckpointDamaged(step, WHERE, name, "is not what was saved: its digest differs")
