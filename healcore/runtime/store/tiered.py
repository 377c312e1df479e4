"""A memory store and a disk store as one store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from healcore.runtime.store import protocol, ranks
from healcore.runtime.store.directory import DirectoryStore
from healcore.runtime.store.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    SaveFailed,
    StoreError,
)
from healcore.runtime.store.memory import SnapshotStore
from healcore.runtime.store.protocol import CheckpointStore, Restored, Saved
from healcore.runtime.store.tier import Tier

T = TypeVar("T")


class TieredStore(CheckpointStore):
    """Saves to memory first, then to disk.

    Every save takes one copy of the state, in memory, and is written to disk from that copy in the
    background. A checkpoint in both tiers is restored from memory, or from disk if
    the copy in memory is damaged. A damaged copy in memory is dropped.

    Args:
        memory: the fast store. It uses the copier of `disk` from now on.
        disk: the store that outlives the process.
    """

    def __init__(self, memory: SnapshotStore, disk: DirectoryStore) -> None:
        self._memory = memory
        self._disk = disk
        self.root, self.processes = disk.root, disk.processes
        self._trouble: list[StoreError] = []
        self.nonfinite_ok = tuple(dict.fromkeys((*memory.nonfinite_ok, *disk.nonfinite_ok)))
        memory.copier = disk.copier  # shares the spare memory

    # -- the tiers ------------------------------------------------------------------------------

    @property
    def tiers(self) -> tuple[SnapshotStore, DirectoryStore]:
        """Memory and disk, in this order."""
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

    # -- the protocol ---------------------------------------------------------------------------

    def save(
        self, step: int, state: Mapping[str, Any], *, healing: Mapping[str, Any] | None = None
    ) -> None:
        """Copies to memory, and writes to disk from there in the background.

        Ranks exchange in the background only.
        """
        self.disk.write(
            protocol.checked_step(step),
            lambda: self.memory.hold(step, state, healing),
            self.memory.release,
        )

    def steps(self) -> list[Saved]:
        """Checkpoints of both tiers, ascending by step.

        If the tiers hold different saves of a step, the save in memory is listed, because it is
        newer. If the disk cannot be read, only memory is listed, and `trouble` returns the error.

        Raises:
            StoreError: the disk cannot be read, and memory is empty.
        """
        in_memory = {saved.step: saved for saved in self.memory.steps()}
        saves = {**in_memory}
        for saved in self._on_disk():
            near = in_memory.get(saved.step)
            if near is None or _same_save(near, saved):
                saves[saved.step] = saved
        return [saves[step] for step in sorted(saves)]

    def verify(self, step: int) -> Saved:
        """Recomputes the digests in both tiers; one intact copy is enough."""
        self._on_copies(step, lambda tier: tier.verify(step), first_only=False)
        return next(saved for saved in self.steps() if saved.step == step)

    def restore(self, step: int, like: Mapping[str, Any]) -> Restored:
        """Restores the copy in memory if it is intact, else the copy on disk."""
        return self._on_copies(step, lambda tier: tier.restore(step, like), first_only=True)

    def healings(self) -> dict[int, dict[str, Any]]:
        """The healing states by step, of memory where the tiers differ."""
        return {**self.disk.healings(), **self.memory.healings()}

    def commit(self, step: int, healing: Mapping[str, Any]) -> None:
        """Replaces the healing state of every copy. An older save of the step on disk stays."""
        in_memory, tiers = self._locate(step)
        if in_memory:
            self.memory.commit(step, healing)
        if self.disk in tiers:
            self.disk.commit(step, healing)

    def delete(self, step: int) -> None:
        """Removes every copy. An older save of the step on disk stays, and is listed again."""
        in_memory, tiers = self._locate(step)
        if in_memory:
            self.memory.delete(step)
        if self.disk in tiers:
            self.disk.delete(step)

    def wait(self) -> None:
        """Waits until every save is in memory and on disk."""
        self.disk.join()
        self.memory.wait()
        self.disk.wait()

    def failures(self) -> list[SaveFailed]:
        """Failed saves of both tiers since the last call."""
        return [*self.memory.failures(), *self.disk.failures()]

    def damaged(self) -> list[CheckpointDamaged]:
        """Checkpoints on disk that are too damaged for `steps` to list."""
        return self.disk.damaged()

    def trouble(self) -> list[StoreError]:
        """Errors of one tier since the last call for which the other tier was used instead."""
        errors, self._trouble = self._trouble, []
        return errors

    def nonfinite_found(self) -> list[tuple[int, tuple[str, ...]]]:
        """Step and array names of each save since the last call with disallowed NaN or Inf."""
        return self.memory.nonfinite_found()

    def nonfinite_in(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the arrays in a state that hold NaN or Inf on any rank; saves nothing."""
        return self.disk.nonfinite_in(state)

    # -- within ---------------------------------------------------------------------------------

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
        same_save = far is not None and (near is None or _same_save(near, far))
        by_rank = self.processes.gather((near is not None, far is not None, same_save))
        in_memories, on_disk, all_same = map(all, zip(*by_rank, strict=True))
        tiers: list[Tier] = []
        if in_memories:
            tiers.append(self.memory)
        if on_disk and (all_same or not in_memories):
            tiers.append(self.disk)
        if not tiers:
            existing = [saved.step for saved in self.steps()]
            raise CheckpointNotFound(step, existing, f"memory and {self.disk.root}")
        return near is not None, tiers

    def _on_copies(self, step: int, action: Callable[[Tier], T], *, first_only: bool) -> T:
        """Runs an action on the copies of a step; raises if all copies are damaged."""
        results: list[T] = []
        damage: list[CheckpointDamaged] = []
        for tier in self._locate(step)[1]:
            try:
                # Each rank has its own memory. A disk store already acts on all ranks together.
                act = lambda tier=tier: action(tier)  # noqa: E731
                results.append(act() if tier.durable else ranks.on_each(self.processes, act))
            except CheckpointDamaged as error:
                damage.append(error)
                if tier is self.memory and not error.malformed:
                    with suppress(CheckpointNotFound):
                        self.memory.delete(step)
            if first_only and results:
                break
        self._trouble += damage if results else damage[:-1]
        if not results:
            raise damage[-1]
        return results[0]


def _same_save(in_memory: Saved, on_disk: Saved) -> bool:
    """Whether memory and disk have the same save of a step."""
    return in_memory.created == on_disk.created
