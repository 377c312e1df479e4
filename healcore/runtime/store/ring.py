"""`Ring`: the newest copies of a state in host memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from healcore.runtime.store import host_memory
from healcore.runtime.store.checkpoints import (
    AttemptHistory,
    CheckpointInfo,
    Keep,
    superfluous,
)
from healcore.runtime.store.state_copy import HostCopy


class Ring:
    """Inspected copies by step, as many as `keep` allows, for a rollback within milliseconds.

    The dictionary is replaced, never changed, because the background replaces it too.

    Attributes:
        keep: how many copies of each kind to keep, or None to keep none. It is set to None if the
            copies do not fit into the host's memory.
        protected: steps whose copies `prune` never removes.
        copies: step -> copy.
    """

    def __init__(self, keep: Keep | None) -> None:
        if keep is not None:
            keep.checked()
        self.keep = keep
        self.protected: frozenset[int] = frozenset()
        self.copies: dict[int, HostCopy] = {}

    def has_room(self, copy: HostCopy, world: int) -> bool:
        """Whether the copies that follow `copy` fit into half of the free host memory.

        Assumes that all ranks share this machine: a slow rollback is better than an OOM kill.

        Args:
            copy: the first or the next copy.
            world: number of ranks.
        """
        following = 0
        if self.keep is not None:
            following = self.keep.most - len(self.copies)
        # The other half is for data loaders, the page cache and the next allocation.
        return following * copy.nbytes * world <= host_memory.free_bytes() / 2

    def add(self, copy: HostCopy, nonfinite_ok: Collection[str]) -> HostCopy | None:
        """Adds an inspected copy, and removes the copies that are superfluous then.

        Args:
            copy: an inspected copy, whose digests and NaN are known.
            nonfinite_ok: patterns of array names where NaN and Inf are allowed.

        Returns:
            A copy that is not in the ring, possibly the new copy. Its memory can be reused. None if
            all copies are in the ring.
        """
        held = [copy, *self.copies.values()]
        if self.keep is not None:
            self.copies = {**self.copies, copy.step: copy}
            self.prune(nonfinite_ok)
        for each in held:
            if each not in self.copies.values():
                return each
        return None

    def prune(self, nonfinite_ok: Collection[str]) -> None:
        """Removes the copies that `superfluous` names; `nonfinite_ok` is as for `add`."""
        if self.keep is None:
            return
        attempts = AttemptHistory.newest(self.records())
        saves = attempts.with_status(self.listed(nonfinite_ok))
        for step in superfluous(saves, self.keep, nonfinite=0, stay=self.protected):
            self.forget(step)

    def forget(self, step: int) -> None:
        """Removes the copy of a step, if there is one."""
        copies = dict(self.copies)
        copies.pop(step, None)
        self.copies = copies

    def listed(self, nonfinite_ok: Collection[str]) -> list[CheckpointInfo]:
        """The entries of the copies in a list of checkpoints.

        Args:
            nonfinite_ok: patterns of array names where NaN and Inf are allowed.

        Returns:
            An entry for each copy, whose status is not set yet.
        """
        return [CheckpointInfo.of(copy, None, nonfinite_ok) for copy in self.copies.values()]

    def records(self) -> dict[int, dict[str, Any]]:
        """The records of the run by step."""
        records: dict[int, dict[str, Any]] = {}
        for step, copy in self.copies.items():
            record = copy.unsealed_record
            if record is not None:
                records[step] = record
        return records
