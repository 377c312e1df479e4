"""Two stores as one: memory for speed, disk for safety."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from healcore.runtime.store import protocol, ranks, retention
from healcore.runtime.store.background import Background
from healcore.runtime.store.directory import DirectoryStore
from healcore.runtime.store.errors import (
    CheckpointDamaged,
    LastGoodKept,
    NotThere,
    SaveFailed,
    StoreError,
)
from healcore.runtime.store.memory import Slot, SnapshotStore
from healcore.runtime.store.protocol import Restored, Saved, Status
from healcore.runtime.store.ranks import RankFailed, Ranks

T = TypeVar("T")
Tier = SnapshotStore | DirectoryStore


class TieredStore:
    """Memory first, then disk.

    Every save takes one copy of the state, in memory. A save that also goes to disk is written from
    that copy in the background, and holds it until it is written. A checkpoint that is in both is
    restored from memory, or from disk if the one in memory is damaged. A damaged copy is taken out
    (dropped from memory, quarantined on disk) while the other one stays in use.

    Args:
        memory: the fast store.
        disk: the safe one.
        disk_every: one of how many saves goes to disk; the first does.
    """

    def __init__(self, memory: SnapshotStore, disk: DirectoryStore, *, disk_every: int = 1) -> None:
        if isinstance(disk_every, bool) or not isinstance(disk_every, int) or disk_every < 1:
            raise StoreError(f"disk_every is a whole number >= 1, not {disk_every!r}")
        self.memory = memory
        self.disk = disk
        self.disk_every = disk_every
        self._saves = 0
        self._behind = Background("healcore-tiers")
        self._written: Future[None] | None = None
        self._trouble: list[StoreError] = []

    # -- the protocol ---------------------------------------------------------------------------

    def save(
        self, step: int, state: Mapping[str, Any], *, healing: Mapping[str, Any] | None = None
    ) -> None:
        """Copies to memory; every `disk_every`-th save is written to disk from there."""
        step = protocol.checked_step(step)
        due = self._saves % self.disk_every == 0
        self._saves += 1
        if not due:
            self.memory.save(step, state, healing=healing)
            return
        if self._written is not None and self.busy:
            self._written.result()  # one write at a time: each holds a copy in memory
        self._to_both(step, state, healing)

    def save_in_memory(
        self, step: int, state: Mapping[str, Any], *, healing: Mapping[str, Any] | None = None
    ) -> None:
        """`save` only to memory, without waiting for a disk that still writes the previous save."""
        self._saves += 1
        self.memory.save(step, state, healing=healing)

    def save_on_disk(
        self, step: int, state: Mapping[str, Any], *, healing: Mapping[str, Any] | None = None
    ) -> None:
        """`save` only to disk: the copy that it is written from pushes none out of memory."""
        step = protocol.checked_step(step)
        if self._written is not None and self.busy:
            self._written.result()
        self._to_both(step, state, healing, in_ring=False)

    def steps(self) -> list[Saved]:
        """Checkpoints of both, ascending; what is in both has its status in memory.

        Of two saves of one step the one in memory counts: it is newer. If the disk cannot be read
        any more, only memory is listed, and `trouble` reports it.

        Raises:
            StoreError: the disk cannot be read, and there is nothing in memory.
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
        """Recomputes the digests in both; one intact copy is enough."""
        self._each(step, lambda tier: tier.verify(step), first=False)
        return next(saved for saved in self.steps() if saved.step == step)

    def restore(self, step: int, like: Mapping[str, Any]) -> Restored:
        """From memory if it is there and intact, else from disk."""
        return self._each(step, lambda tier: tier.restore(step, like), first=True)

    def mark(self, step: int, status: Status) -> None:
        """Marks every copy. An older save of the step on disk keeps its status."""
        in_memory, tiers = self._locate(step)

        def mark_in_memory() -> None:
            if in_memory:
                self.memory.mark(step, status)

        ranks.together(self._ranks, mark_in_memory)
        if self.disk in tiers:
            self.disk.mark(step, status)

    def delete(self, step: int) -> None:
        """Removes every copy, unless it is the last known-good one.

        The last known-good one on disk stays whatever is in memory, because a crash loses the
        memory. An older save of the step on disk is listed again when the one in memory is gone.
        """
        in_memory, tiers = self._locate(step)
        last = [retention.is_last_good(each, step) for each in (self.steps(), self._on_disk())]
        last, last_on_disk = map(any, zip(*self._ranks.gather(last), strict=True))
        if last:
            raise LastGoodKept(step)
        if in_memory:
            self.memory.drop(step)
        if self.disk in tiers and not last_on_disk:
            self.disk.drop(step)

    def wait(self) -> None:
        """Waits for the disk."""
        self._behind.join()
        self.memory.wait()
        self._behind.wait()

    def failures(self) -> list[SaveFailed]:
        """Failed saves of both since the last call."""
        return [*self.memory.failures(), *self._behind.failures()]

    def problems(self) -> list[str]:
        """Copies that were found damaged since the last call, and the problems of the disk."""
        trouble = [str(each) for each in self.trouble()]
        return trouble + self.memory.problems() + self.disk.problems()

    # -- beyond it ------------------------------------------------------------------------------

    def trouble(self) -> list[StoreError]:
        """Errors of one tier since the last call, where the other tier could be used instead.

        A CheckpointDamaged is a damaged copy, another StoreError a disk that could not be read.
        """
        found, self._trouble = self._trouble, []
        return found

    def nonfinite_found(self) -> list[tuple[int, tuple[str, ...]]]:
        """Saves since the last call with NaN or Inf that is not allowed, and the array names."""
        self.disk.nonfinite_found()  # memory has reported those already
        return self.memory.nonfinite_found()

    def queues(self) -> list[tuple[Tier, Background]]:
        """Both tiers, each with the queue in which its checkpoints are verified.

        Memory does not wait for the disk: what is known-good in it depends on the steps alone.
        """
        of_disk = self.disk.queues() if self._ranks.world == 1 else [(self.disk, self._behind)]
        return [*self.memory.queues(), *of_disk]

    @property
    def nonfinite_ok(self) -> tuple[str, ...]:
        """Patterns of array names where NaN and Inf are allowed. May be changed, for both."""
        return tuple(dict.fromkeys((*self.memory.nonfinite_ok, *self.disk.nonfinite_ok)))

    @nonfinite_ok.setter
    def nonfinite_ok(self, patterns: Collection[str]) -> None:
        self.memory.nonfinite_ok = self.disk.nonfinite_ok = tuple(patterns)

    def nonfinite_in(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the arrays in a state that hold NaN or Inf, allowed or not; saves nothing.

        Raises:
            UnsavableState: there is something in the state that cannot be saved.
        """
        self._behind.join()
        found = ranks.together(self._ranks, lambda: self.memory.nonfinite_in(state))
        return ranks.united(found)

    @property
    def busy(self) -> bool:
        """Whether a save is still being written, so that the next would wait for it."""
        return self._behind.pending(self._written)

    def describe(self, state_bytes: int | None = None) -> str:
        """The bound on host memory, as text."""
        return f"{self.memory.describe(state_bytes)}, and one more while it is written to disk"

    # -- within ---------------------------------------------------------------------------------

    @property
    def _ranks(self) -> Ranks:
        return self.disk.processes

    def _to_both(
        self,
        step: int,
        state: Mapping[str, Any],
        healing: Mapping[str, Any] | None,
        *,
        in_ring: bool = True,
    ) -> None:
        """Copies to memory and submits the write. Ranks exchange in the background only."""
        try:
            slot = self.memory.save_and_hold(step, state, healing=healing, in_ring=in_ring)
        except Exception as error:
            if self._ranks.world > 1:  # the others have a copy, and wait for this rank's
                failure = error
                self._written = self._behind.submit(
                    step, "while copying the state", lambda: self._raise_on_all(failure)
                )
            raise
        self._written = self._behind.submit(
            step, "while writing to disk", lambda: self._to_disk(step, slot)
        )

    def _to_disk(self, step: int, slot: Slot) -> None:
        try:
            state, healing = ranks.on_each(self._ranks, lambda: self.memory.read_held(slot))
            # Every rank has a clock of its own, and the disk has that of rank 0.
            slot.created = ranks.agreed(self._ranks, slot.created)
            self.disk.save_held(step, state, healing=healing, created=slot.created)
            self.disk.wait()
        finally:
            self.memory.end_hold(slot)

    def _raise_on_all(self, failure: Exception) -> None:
        """Makes the save fail on the other ranks because this one could not copy its state."""

        def fail() -> None:
            raise failure

        with suppress(type(failure)):  # `save` has raised it on this rank
            ranks.on_each(self._ranks, fail)

    def _on_disk(self) -> list[Saved]:
        """The checkpoints on disk; none if it cannot be read and memory has some."""
        try:
            return self.disk.steps()
        except StoreError as error:
            if not self.memory.steps():
                raise
            self._trouble.append(error)
            return []

    def _locate(self, step: int) -> tuple[bool, list[Tier]]:
        """Whether a step is in this rank's memory, and the stores that have it on every rank.

        Memory comes first. No rank uses what one rank has lost, such as a damaged snapshot.
        """
        self._behind.join()
        near = next((saved for saved in self.memory.steps() if saved.step == step), None)
        far = next((saved for saved in self._on_disk() if saved.step == step), None)
        one = far is not None and (near is None or _same(near, far))
        seen = self._ranks.gather((near is not None, far is not None, one))
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
        """Runs an action on the copies of a step; takes out the damaged, raises if all are."""
        results: list[T] = []
        damage: list[CheckpointDamaged] = []
        for tier in self._locate(step)[1]:
            try:
                results.append(self._together(tier, action))
            except CheckpointDamaged as error:
                damage.append(error)
                if not error.malformed:
                    self._take_out(tier, step)
            if first and results:
                break
        self._trouble += damage if results else damage[:-1]
        if not results:
            raise damage[-1]
        return results[0]

    def _together(
        self,
        tier: Tier,
        action: Callable[[Tier], T],
    ) -> T:
        """Runs an action on a tier; an error in the memory of one rank is an error on all.

        Of several errors all raise one that is no damage: after damage they try the next tier.
        """
        if not isinstance(tier, SnapshotStore):
            return action(tier)
        results: list[T] = []
        failure = None
        try:
            results.append(action(tier))
        except Exception as error:
            failure = error
        sent = failure
        if not isinstance(failure, (StoreError, type(None))):  # may not be picklable
            sent = RankFailed(f"rank {self._ranks.rank}: {type(failure).__name__}: {failure}")
        failures = [failure, *self._ranks.gather(sent)]
        failures = [each for each in failures if each is not None]
        if failures:
            raise min(failures, key=lambda each: isinstance(each, CheckpointDamaged))
        return results[0]

    def _take_out(self, tier: Tier, step: int) -> None:
        try:
            if isinstance(tier, SnapshotStore):
                tier.drop(step)
            else:
                tier.mark(step, "quarantined")
        except StoreError:
            return  # not listed any more, or a disk that cannot be written: reported already


def _same(near: Saved, far: Saved) -> bool:
    """Whether memory and disk have the same save of a step, and none of the copies is damaged."""
    damaged_on_disk = far.status == "quarantined" != near.status
    return near.created == far.created and not damaged_on_disk
