"""A memory store and a disk store as one store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from healcore.runtime.store import protocol, ranks
from healcore.runtime.store.directory import DirectoryStore
from healcore.runtime.store.errors import (
    CheckpointDamaged,
    LastGoodKept,
    NotThere,
    SaveFailed,
    StoreError,
)
from healcore.runtime.store.memory import SnapshotStore
from healcore.runtime.store.protocol import CheckpointStore, Restored, Saved, Status
from healcore.runtime.store.tier import Tier

T = TypeVar("T")


class TieredStore(CheckpointStore):
    """Saves to memory first, then to disk.

    Every save takes one copy of the state, in memory. A save that also goes to disk is written from
    that copy in the background. A checkpoint that is in both tiers is restored from memory, or from
    disk if the copy in memory is damaged. A damaged copy is dropped from memory, or quarantined on
    disk, and the other copy stays in use.

    Args:
        memory: the fast store. From now on it takes its copies as `disk` does.
        disk: the store that outlives the process.
        disk_every: every how many saves one goes to disk, beginning with the first.
    """

    def __init__(self, memory: SnapshotStore, disk: DirectoryStore, *, disk_every: int = 1) -> None:
        if isinstance(disk_every, bool) or not isinstance(disk_every, int) or disk_every < 1:
            raise StoreError(f"disk_every is a whole number >= 1, not {disk_every!r}")
        self._memory = memory
        self._disk = disk
        self.root, self.processes = disk.root, disk.processes
        self.disk_every = disk_every
        self._saves = 0
        self._trouble: list[StoreError] = []
        self.nonfinite_ok = tuple(dict.fromkeys((*memory.nonfinite_ok, *disk.nonfinite_ok)))
        memory.copier = disk.copier  # shares the spare memory and `trust`

    # -- the tiers ------------------------------------------------------------------------------

    @property
    def tiers(self) -> tuple[SnapshotStore, DirectoryStore]:
        """Memory, and the disk."""
        return self._memory, self._disk

    @property
    def memory(self) -> SnapshotStore:
        """The fast store. Saves to it do not wait for the disk."""
        return self._memory

    @property
    def disk(self) -> DirectoryStore:
        """The store that outlives the process."""
        return self._disk

    @property
    def nonfinite_ok(self) -> tuple[str, ...]:
        """Patterns of array names where NaN and Inf are allowed, in both tiers."""
        return self.disk.nonfinite_ok

    @nonfinite_ok.setter
    def nonfinite_ok(self, patterns: Collection[str]) -> None:
        self.memory.nonfinite_ok = self.disk.nonfinite_ok = tuple(patterns)

    @property
    def busy(self) -> bool:
        """Whether a save is still being written, so that the next save would wait."""
        return self.disk.busy

    # -- the protocol ---------------------------------------------------------------------------

    def save(
        self, step: int, state: Mapping[str, Any], *, healing: Mapping[str, Any] | None = None
    ) -> None:
        """Copies to memory; every `disk_every`-th save is written to disk from there."""
        self._saves += 1
        if (self._saves - 1) % self.disk_every:
            self.memory.save(step, state, healing=healing)
        else:
            self._to_disk(step, state, healing, in_ring=True)

    def save_on_disk(
        self, step: int, state: Mapping[str, Any], *, healing: Mapping[str, Any] | None = None
    ) -> None:
        """`save` to disk only; pushes no checkpoint out of memory."""
        self._to_disk(step, state, healing, in_ring=False)

    def steps(self) -> list[Saved]:
        """Checkpoints of both tiers, ascending by step.

        The status in memory counts. Of two different saves of one step the save in memory counts,
        because it is newer. If the disk cannot be read, only memory is listed, and `trouble` has
        the error.

        Raises:
            StoreError: the disk cannot be read, and memory is empty.
        """
        found = {saved.step: saved for saved in self._on_disk()}
        for near in self.memory.steps():
            far = found.get(near.step)
            if far is not None and _same(near, far):
                found[near.step] = far._replace(status=near.status)
            else:
                found[near.step] = near
        return [found[step] for step in sorted(found)]

    def verify(self, step: int) -> Saved:
        """Recomputes the digests in both tiers; one intact copy is enough."""
        self._each(step, lambda tier: tier.verify(step), first=False)
        return next(saved for saved in self.steps() if saved.step == step)

    def restore(self, step: int, like: Mapping[str, Any]) -> Restored:
        """Restores from memory if an intact copy is there, else from disk."""
        return self._each(step, lambda tier: tier.restore(step, like), first=True)

    def mark(self, step: int, status: Status) -> None:
        """Marks every copy. An older save of the step on disk keeps its status."""
        in_memory, tiers = self._locate(step)

        def mark_in_memory() -> None:
            if in_memory:
                self.memory.mark(step, status)

        ranks.together(self.processes, mark_in_memory)
        if self.disk in tiers:
            self.disk.mark(step, status)

    def delete(self, step: int) -> None:
        """Removes every copy, unless it is the last known-good one.

        The last known-good checkpoint on disk always stays, because a crash loses the memory. An
        older save of the step on disk is listed again.
        """
        in_memory, tiers = self._locate(step)
        last = [protocol.is_last_good(each, step) for each in (self.steps(), self._on_disk())]
        last, last_on_disk = map(any, zip(*self.processes.gather(last), strict=True))
        if last:
            raise LastGoodKept(step)
        if in_memory:
            self.memory.drop(step)
        if self.disk in tiers and not last_on_disk:
            self.disk.drop(step)

    def wait(self) -> None:
        """Waits for the disk."""
        self.disk.join()
        self.memory.wait()
        self.disk.wait()

    def failures(self) -> list[SaveFailed]:
        """Failed saves of both tiers since the last call."""
        return [*self.memory.failures(), *self.disk.failures()]

    def problems(self) -> list[str]:
        """Copies that were found damaged since the last call, and the problems of both tiers."""
        trouble = [str(each) for each in self.trouble()]
        return trouble + self.memory.problems() + self.disk.problems()

    def damaged(self) -> list[CheckpointDamaged]:
        """Checkpoints on disk that are too damaged for `steps` to list."""
        return self.disk.damaged()

    def trouble(self) -> list[StoreError]:
        """Errors of one tier since the last call, where the other tier could be used instead."""
        found, self._trouble = self._trouble, []
        return found

    def nonfinite_found(self) -> list[tuple[int, tuple[str, ...]]]:
        """Saves since the last call with NaN or Inf that is not allowed, and the array names."""
        return self.memory.nonfinite_found()

    def nonfinite_in(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the arrays in a state that hold NaN or Inf on any rank; saves nothing."""
        return self.disk.nonfinite_in(state)

    def describe(self, state_bytes: int | None = None) -> str:
        """The bound on host memory, as text."""
        return f"{self.memory.describe(state_bytes)}, and one more while it is written to disk"

    # -- within ---------------------------------------------------------------------------------

    def _to_disk(
        self,
        step: int,
        state: Mapping[str, Any],
        healing: Mapping[str, Any] | None,
        *,
        in_ring: bool,
    ) -> None:
        """Copies to memory and queues the write. Ranks exchange in the background only."""
        self.disk.write(
            protocol.checked_step(step),
            lambda: self.memory.hold(step, state, healing, in_ring=in_ring),
            self.memory.release,
        )

    def _on_disk(self) -> list[Saved]:
        """The checkpoints on disk; an empty list if only memory can be read."""
        try:
            return self.disk.steps()
        except StoreError as error:
            if not self.memory.steps():
                raise
            self._trouble.append(error)
            return []

    def _locate(self, step: int) -> tuple[bool, list[Tier]]:
        """Whether a step is in this rank's memory, and the tiers that have it on every rank.

        Memory comes first. No rank uses a copy that another rank has lost.
        """
        self.disk.join()
        near = next((saved for saved in self.memory.steps() if saved.step == step), None)
        far = next((saved for saved in self._on_disk() if saved.step == step), None)
        one = far is not None and (near is None or _same(near, far))
        seen = self.processes.gather((near is not None, far is not None, one))
        near_there, far_there, all_one = map(all, zip(*seen, strict=True))
        tiers: list[Tier] = []
        if near_there:
            tiers.append(self.memory)
        if far_there and (all_one or not near_there):
            tiers.append(self.disk)
        if not tiers:
            there = [saved.step for saved in self.steps()]
            raise NotThere(step, there, f"memory and {self.disk.root}")
        return near is not None, tiers

    def _each(self, step: int, action: Callable[[Tier], T], *, first: bool) -> T:
        """Runs an action on the copies of a step; raises if all of them are damaged."""
        results: list[T] = []
        damage: list[CheckpointDamaged] = []
        for tier in self._locate(step)[1]:
            try:
                # Each rank has its own memory; on disk all ranks act together anyway.
                act = lambda tier=tier: action(tier)  # noqa: E731
                results.append(act() if tier.durable else ranks.on_each(self.processes, act))
            except CheckpointDamaged as error:
                damage.append(error)
                if not error.malformed:
                    tier.take_out(step, copied=True)
            if first and results:
                break
        self._trouble += damage if results else damage[:-1]
        if not results:
            raise damage[-1]
        return results[0]


def _same(near: Saved, far: Saved) -> bool:
    """Whether memory and disk have the same save of a step, and no copy is damaged."""
    damaged_on_disk = far.status == "quarantined" != near.status
    return near.created == far.created and not damaged_on_disk
