"""Copies of a state in host memory: stores check, digest and write them, and restore from them."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from healcore.runtime.store import inspection, protocol
from healcore.runtime.store.errors import SaveFailed, StateMismatch, StoreError
from healcore.runtime.store.host_memory import Arena, Block, CopyBlocks
from healcore.runtime.store.inspection import Inspection
from healcore.runtime.store.protocol import Status
from healcore.runtime.store.structure import Flat, decode, described, is_stateful, nodes_of


@dataclass
class Snapshot(ABC):
    """The arrays of a state in host memory."""

    flat: Flat
    """The state, whose leaves are in host memory."""
    arena: Arena
    """Memory of the leaves."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return self.arena.nbytes

    @abstractmethod
    def settle(self) -> None:
        """Waits until the copy is complete; copies off an accelerator are asynchronous."""

    @abstractmethod
    def blocks(self) -> Iterator[Block]:
        """The bytes of the arrays, in a fixed order. Only after `settle`."""


@dataclass
class StateCopy:
    """A copy of a state as it was after one step, with its status in memory."""

    step: int
    snapshot: Snapshot
    healing: bytes | None
    created: float
    inspecting: Future[None] | None = None
    """The job that inspects the copy, if the copy is for memory."""
    found: Inspection | None = None
    """None until the copy is complete and inspected. Only then it enters the ring in memory."""
    status: Status = "candidate"
    holders: int = 0
    """Number of readers that use the memory."""
    dropped: bool = False
    """Whether the copy is not in the ring."""

    @property
    def digests(self) -> dict[str, str]:
        """Key of a block -> digest."""
        assert self.found is not None, "copies in the ring are inspected"
        return self.found.digests

    @property
    def healing_state(self) -> dict[str, Any] | None:
        """A fresh copy of the healing state."""
        return None if self.healing is None else json.loads(self.healing)

    def settle(self) -> None:
        """Waits until the copy is complete, and inspected if it is for memory.

        Raises:
            StoreError: the copy failed.
        """
        if self.inspecting is None:
            self.snapshot.settle()
            return
        self.inspecting.result()
        if self.found is None:
            raise StoreError(f"the copy of step {self.step} could not be completed")

    def nonfinite(self) -> tuple[str, ...]:
        """Names of the arrays with NaN or Inf, allowed or not. Only after `settle`."""
        if self.found is not None:
            return self.found.nonfinite
        return inspection.nonfinite(self.snapshot.blocks())


class Copier(ABC):
    """Copies a framework's states to host memory and back; subclasses know the framework's arrays.

    The memory of a copy that is not needed any more is used again for the next copy.
    """

    def __init__(self) -> None:
        self._spare: deque[Any] = deque(maxlen=1)

    # -- the framework's part -------------------------------------------------------------------

    @abstractmethod
    def flatten(self, state: Mapping[str, Any], *, live: bool = False) -> Flat:
        """The structure of a state and its arrays, uncopied; UnsavableState if it cannot be saved.

        A `live` state is only compared with a saved state: shapes may replace its arrays, and it
        may hold values that cannot be saved.
        """

    @abstractmethod
    def take(self, state: Mapping[str, Any], recycled: Any | None = None) -> Any:
        """A snapshot of the present state; uses the memory of `recycled` again, if it fits."""

    @abstractmethod
    def arrays(self, snapshot: Any) -> dict[str, Any]:
        """The framework's arrays in the snapshot's own memory, by name."""

    @abstractmethod
    def copies(
        self, snapshot: Any, names: set[str], live: Flat, copy: CopyBlocks
    ) -> dict[str, Any]:
        """The framework's arrays of some names in fresh memory, placed as the live ones are."""

    @abstractmethod
    def fetch(
        self, name: str, tag: str, content: Any, arrays: Mapping[str, Any], live: Flat | None
    ) -> Any:
        """The value of a node, see `structure.Fetch`; arrays of `arrays` become part of it.

        `live` gives the devices, or is None where `load_state_dict` moves the value.
        """

    # -- copies ---------------------------------------------------------------------------------

    def copy(
        self, step: int, state: Mapping[str, Any], healing: Mapping[str, Any] | None
    ) -> StateCopy:
        """Copies a state, as `CheckpointStore.save` describes."""
        step = protocol.checked_step(step)
        kept = None if healing is None else protocol.frozen(healing)
        try:
            snapshot = self._reusing(state)
        except StoreError:
            raise
        except Exception as error:
            raise SaveFailed(step, "while copying the state", error) from error
        return StateCopy(step, snapshot, kept, time.time())

    def release(self, copy: StateCopy) -> None:
        """Keeps the memory of a copy for the next copy."""
        self._spare.append(copy.snapshot)

    @property
    def spare_bytes(self) -> int:
        """Bytes of host memory kept for the next copy."""
        return sum(snapshot.nbytes for snapshot in tuple(self._spare))

    def nonfinite_in(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the arrays in a state that hold NaN or Inf, allowed or not."""
        snapshot = self._reusing(state)
        try:
            snapshot.settle()
            return inspection.nonfinite(snapshot.blocks())
        finally:
            self._spare.append(snapshot)  # for the first save

    def _reusing(self, state: Mapping[str, Any]) -> Any:
        spare = self._spare.popleft() if self._spare else None
        try:
            return self.take(state, spare)
        except Exception:
            if spare is not None:
                self._spare.append(spare)
            raise

    # -- restoring ------------------------------------------------------------------------------

    def checked(
        self, step: int | None, saved: Mapping[str, Mapping[str, Any]], like: Mapping[str, Any]
    ) -> Flat:
        """The live state flattened; StateMismatch if the saved entries do not fit it.

        Trees must have the same arrays. For objects with `state_dict` only names and identities are
        compared: a fresh optimizer has no moments yet, and `load_state_dict` checks the rest.
        """
        flat = self.flatten(like, live=True)
        wrong = [f'there is no "{name}" in it' for name in like if name not in saved]
        for name, entry in flat.entries.items():
            if name not in saved:
                continue
            if is_stateful(entry):
                if "identity" in entry and "identity" in saved[name]:
                    wrong += _differences(saved[name]["identity"], entry["identity"])
            elif "leaves" in entry and "leaves" not in saved[name]:
                wrong.append(f'"{name}" was an object with state_dict')
            else:
                wrong += _differences(described(name, saved[name]), described(name, entry))
        if wrong:
            raise StateMismatch(step, wrong)
        return flat

    def assemble(
        self,
        entries: Mapping[str, Mapping[str, Any]],
        arrays: Mapping[str, Any],
        like: Mapping[str, Any],
        live: Flat,
    ) -> dict[str, Any]:
        """A state made of its saved entries and `arrays`.

        `live` is `like` flattened, which gives PyTreeDefs and devices.
        """
        state = {}
        for name, value in like.items():
            entry, has_state_dict = entries[name], hasattr(value, "state_dict")
            devices = None if is_stateful(entry) or has_state_dict else live

            def fetch(tag: str, content: Any, name: str = name, devices: Any = devices) -> Any:
                return self.fetch(name, tag, content, arrays, devices)

            if "leaves" in entry:
                leaves = [decode(node, fetch) for _, node in entry["leaves"]]
                state[name] = live.treedefs[name].unflatten(leaves)
            else:
                state[name] = decode(entry["tree"], fetch)
        return state

    def give(self, snapshot: Any, like: Mapping[str, Any], copy: CopyBlocks) -> dict[str, Any]:
        """The state in fresh memory, placed as `like` is; StateMismatch if it does not fit."""
        saved = snapshot.flat.entries
        like = protocol.wanted(saved, like)
        if not like:
            return {}
        live = self.checked(None, saved, like)
        entries = {name: saved[name] for name in like}
        arrays = self.copies(snapshot, set(nodes_of(entries)), live, copy)
        return self.assemble(entries, arrays, like, live)


def _differences(saved: Mapping[str, str], live: Mapping[str, str]) -> list[str]:
    wrong = [f"{place} is not in it" for place in live if place not in saved]
    wrong += [f"{place} is in it and not in the live state" for place in saved if place not in live]
    for place in live.keys() & saved.keys():
        if saved[place] != live[place]:
            wrong.append(f"{place} is {saved[place]} in it and {live[place]} in the live state")
    return sorted(wrong)
