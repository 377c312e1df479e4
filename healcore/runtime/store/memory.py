"""A ring of copies in host memory, for a rollback within milliseconds.

Saving costs one copy of the state. The copy goes into spare memory, and enters the ring when it is
complete and inspected. So a failure during the copy loses no earlier copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from threading import RLock
from typing import Any

from healcore.events import fork_safety
from healcore.runtime.store import inspection, protocol, retention
from healcore.runtime.store.copies import Copier, StateCopy
from healcore.runtime.store.course import newest
from healcore.runtime.store.errors import CheckpointDamaged, CheckpointNotFound
from healcore.runtime.store.protocol import Restored, Saved
from healcore.runtime.store.retention import Keep
from healcore.runtime.store.tier import Tier

SMALL = Keep(good=1, candidates=2)
"""One known-good copy, the next candidate, and the newest copy."""
WHERE = "memory"


class SnapshotStore(Tier):
    """Copies in host memory: as many as `keep` allows, plus one during a save."""

    durable = False

    def __init__(
        self, copier: Copier, keep: Keep = SMALL, *, nonfinite_ok: Collection[str] = ()
    ) -> None:
        super().__init__(WHERE, copier, nonfinite_ok)
        self.keep = keep.checked()
        self._ring: dict[int, StateCopy] = {}
        self._lock = RLock()
        fork_safety.watch(self)

    def forked(self) -> None:
        """Replaces the lock in a forked child, where its holder may not exist."""
        self._lock = RLock()

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
            for name, digest in self.copier.inspect(copy.flat.leaves).digests.items():
                if digest != copy.digests[name]:
                    raise _damaged(step, name)
            return self._as_saved(copy)

    def restore(self, step: int, like: Mapping[str, Any]) -> Restored:
        """Copies the arrays, verifying every digest during the copy."""
        with self.reading(step) as copy:
            state = self.copier.restore(copy, like, lambda name: _damaged(step, name))
            return Restored(state, copy.healing_state)

    def healings(self) -> dict[int, dict[str, Any]]:
        """The healing states by step."""
        self.join()
        with self._lock:
            found = {step: copy.healing_state for step, copy in self._ring.items()}
        return {step: healing for step, healing in found.items() if healing is not None}

    def commit(self, step: int, healing: Mapping[str, Any]) -> None:
        """Replaces the healing state of a checkpoint."""
        encoded = protocol.encode_healing(healing)
        self.join()
        with self._lock:
            self._find(step).healing = encoded
            self._prune()

    def delete(self, step: int) -> None:
        """Removes a checkpoint."""
        self.join()
        with self._lock:
            self._find(step)
            self._remove(self._ring.pop(step))

    def nonfinite_found(self) -> list[tuple[int, tuple[str, ...]]]:
        """Step and array names of each save since the last call with disallowed NaN or Inf."""
        self.join()
        return super().nonfinite_found()

    # -- beyond the protocol --------------------------------------------------------------------

    def hold(
        self, step: int, state: Mapping[str, Any], healing: Mapping[str, Any] | None = None
    ) -> StateCopy:
        """Saves; the copy stays readable until `release`, even if it leaves the ring."""
        self.join()  # a copy that leaves the ring then frees its memory for this copy
        copy = self.copier.copy(step, state, healing)
        copy.holders = 2  # `_inspect_and_add` and the caller
        copy.inspecting = self._saves.submit(
            copy.step, "while copying the state", lambda: self._inspect_and_add(copy)
        )
        return copy

    def release(self, copy: StateCopy) -> None:
        """Ends one use of a copy."""
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

    def _inspect_and_add(self, copy: StateCopy) -> None:
        """Completes and inspects a copy, then adds it to the ring. Runs in the background."""
        try:
            copy.copied()
            copy.inspected = self.copier.inspect(copy.flat.leaves)
            nonfinite = self._as_saved(copy).nonfinite
            if nonfinite:
                self._nonfinite.append((copy.step, nonfinite))
            self._add(copy)
        except BaseException:
            copy.dropped = True
            raise
        finally:
            self.release(copy)

    def _add(self, copy: StateCopy) -> None:
        """Adds a copy to the ring and removes superfluous copies, which may include this copy."""
        with self._lock:
            replaced = self._ring.pop(copy.step, None)
            if replaced is not None:
                self._remove(replaced)
            self._ring[copy.step] = copy
            self._prune()

    def _as_saved(self, copy: StateCopy) -> Saved:
        """The entry in `steps`, without a status."""
        names = copy.inspected.nonfinite if copy.inspected else ()
        nonfinite = inspection.disallowed(names, self.nonfinite_ok)
        return Saved(
            step=copy.step,
            status="candidate",
            finite=not nonfinite,
            bytes=copy.nbytes,
            created=copy.created,
            attempt=copy.attempt,
            path=None,
            nonfinite=nonfinite,
        )

    def _listed(self) -> list[Saved]:
        with self._lock:
            copies = [self._ring[step] for step in sorted(self._ring)]
        course = newest([(copy.step, copy.course) for copy in copies])
        return course.judged(map(self._as_saved, copies))

    def _find(self, step: int) -> StateCopy:
        with self._lock:
            if step not in self._ring:
                raise CheckpointNotFound(step, sorted(self._ring), WHERE)
            return self._ring[step]

    def _remove(self, copy: StateCopy) -> None:
        """Marks a copy as dropped and releases its memory, unless somebody still uses it."""
        with self._lock:
            copy.dropped = True
            if not copy.holders:
                self.copier.release(copy)

    def _prune(self) -> None:
        saves = self._listed()
        for step in retention.superfluous(saves, self.keep, nonfinite=0):
            if step not in self.protected:
                self._remove(self._ring.pop(step))


def _damaged(step: int, name: str) -> CheckpointDamaged:
    return CheckpointDamaged(step, WHERE, name, "is not what was saved: its digest differs")
