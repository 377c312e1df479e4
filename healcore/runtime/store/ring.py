"""`Ring`: the newest copies of the state in host memory, for a rollback within milliseconds."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from healcore.runtime.store.copies import StateCopy
from healcore.runtime.store.host_memory import fits
from healcore.runtime.store.retention import Keep, superfluous
from healcore.runtime.store.saved import Course, Saved

IN_MEMORY = Keep(good=1, candidates=2)
"""One known-good copy, the next candidate, and the newest copy."""


class Ring:
    """Inspected copies by step, as many as `keep` allows. With `keep` None it stays empty.

    The dictionary is replaced, never changed, because the background replaces it too.
    """

    def __init__(self, keep: Keep | None) -> None:
        self.keep = keep and keep.checked()
        self.protected: frozenset[int] = frozenset()
        """Steps that never leave the ring by themselves."""
        self.copies: dict[int, StateCopy] = {}

    def has_room(self, copy: StateCopy, processes: int) -> bool:
        """Whether the copies that follow `copy` fit into half of the free host memory.

        Assumes that all processes share this machine: a slow rollback is better than an OOM kill.
        """
        following = self.keep.most - len(self.copies) if self.keep else 0
        return fits(following, copy.nbytes, processes)

    def add(self, copy: StateCopy, nonfinite_ok: Collection[str]) -> StateCopy | None:
        """Adds a copy. Returns a copy that is not in the ring any more, possibly this copy."""
        if self.keep is None:
            return copy
        replaced = self.copies.get(copy.step)
        self.copies = {**self.copies, copy.step: copy}
        return self.prune(nonfinite_ok) or replaced

    def prune(self, nonfinite_ok: Collection[str]) -> StateCopy | None:
        """Removes superfluous copies; returns one of them."""
        copies = self.copies
        saves = Course.newest(self.healings()).judged(self.listed(nonfinite_ok))
        surplus = superfluous(saves, self.keep or IN_MEMORY, nonfinite=0)
        dropped = {*surplus} - self.protected
        self.copies = {step: copy for step, copy in copies.items() if step not in dropped}
        return next((copies[step] for step in dropped), None)

    def forget(self, step: int) -> None:
        """Removes the copy of a step, if there is one."""
        self.copies = {at: copy for at, copy in self.copies.items() if at != step}

    def listed(self, nonfinite_ok: Collection[str]) -> list[Saved]:
        """The entries of the copies in a list of checkpoints, without a status."""
        return [Saved.of(copy, None, nonfinite_ok) for copy in self.copies.values()]

    def healings(self) -> dict[int, dict[str, Any]]:
        """The healing states by step."""
        found = {step: copy.healing_state for step, copy in self.copies.items()}
        return {step: healing for step, healing in found.items() if healing is not None}
