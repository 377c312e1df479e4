"""Copies of a state in host memory, which stores check, write and restore from."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from healcore.runtime.store import checksummed_json, inspection, protocol
from healcore.runtime.store.course import Course
from healcore.runtime.store.errors import SaveFailed, StateMismatch, StoreError
from healcore.runtime.store.host_memory import Arena, Block, CopyBlocks
from healcore.runtime.store.inspection import Inspection
from healcore.runtime.store.structure import Flat, array_types, decode, is_stateful, nodes_of


@dataclass
class Snapshot(ABC):
    """The arrays of a state in host memory."""

    flat: Flat
    """The state, with its leaves in host memory."""
    arena: Arena
    """Memory of the leaves."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return self.arena.nbytes

    @abstractmethod
    def settle(self) -> None:
        """Waits until the copy is complete: copies from an accelerator are asynchronous."""

    @abstractmethod
    def blocks(self) -> Iterator[Block]:
        """The bytes of the arrays, in a fixed order. Call `settle` first."""


@dataclass
class StateCopy:
    """A copy of the state after one step."""

    step: int
    snapshot: Snapshot
    healing: bytes | None
    created: float
    attempt: int = 1
    inspecting: Future[None] | None = None
    """The job that inspects a copy for memory, or None."""
    inspected: Inspection | None = None
    """None until the copy is complete and inspected. Then the copy enters the ring in memory."""
    holders: int = 0
    """Number of users of the memory."""
    dropped: bool = False
    """Whether the copy is not in the ring."""

    @property
    def digests(self) -> dict[str, str]:
        """Key of a block -> digest."""
        assert self.inspected is not None, "copies in the ring are inspected"
        return self.inspected.digests

    @property
    def course(self) -> Course:
        """The course in the healing state."""
        return Course.of(self.healing_state)

    @property
    def healing_state(self) -> dict[str, Any] | None:
        """A fresh copy of the healing state."""
        return None if self.healing is None else checksummed_json.loads(self.healing)

    def settle(self) -> None:
        """Waits until the copy is complete, and inspected if it is for memory.

        Raises:
            StoreError: the copy failed.
        """
        if self.inspecting is None:
            self.snapshot.settle()
            return
        self.inspecting.result()
        if self.inspected is None:
            raise StoreError(f"the copy of step {self.step} could not be completed")

    def nonfinite(self) -> tuple[str, ...]:
        """Names of the arrays with NaN or Inf, allowed or not. Call `settle` first."""
        if self.inspected is not None:
            return self.inspected.nonfinite
        return inspection.nonfinite(self.snapshot.blocks())


class Copier(ABC):
    """Copies states to host memory and back. Each framework has a subclass for its arrays.

    The memory of a released copy is reused for the next copy.
    """

    def __init__(self) -> None:
        self._spare: deque[Any] = deque(maxlen=1)

    # -- the framework's part -------------------------------------------------------------------

    @abstractmethod
    def flatten(self, state: Mapping[str, Any], *, live: bool = False) -> Flat:
        """The structure and arrays of a state, not copied; UnsavableState if it cannot be saved.

        A `live` state is only compared with a saved state: shapes may replace its arrays, and it
        may hold values that cannot be saved.
        """

    @abstractmethod
    def take(self, state: Mapping[str, Any], recycled: Any | None = None) -> Any:
        """A snapshot of the current state; reuses the memory of `recycled` if its size fits."""

    @abstractmethod
    def arrays(self, snapshot: Any) -> dict[str, Any]:
        """The framework's arrays by name, in the snapshot's own memory."""

    @abstractmethod
    def copies(
        self, snapshot: Any, names: set[str], live: Flat, copy: CopyBlocks
    ) -> dict[str, Any]:
        """Copies of the named arrays by name, on the devices of the live arrays."""

    @abstractmethod
    def fetch(
        self, name: str, tag: str, content: Any, arrays: Mapping[str, Any], live: Flat | None
    ) -> Any:
        """Decodes a node (see `structure.Fetch`); its arrays are taken from `arrays`.

        `live` gives the devices. It is None if `load_state_dict` moves the value.
        """

    # -- copies ---------------------------------------------------------------------------------

    def copy(
        self, step: int, state: Mapping[str, Any], healing: Mapping[str, Any] | None
    ) -> StateCopy:
        """Copies a state. Arguments and errors as for `CheckpointStore.save`."""
        step = protocol.checked_step(step)
        healing_bytes = None if healing is None else protocol.encode_healing(healing)
        try:
            snapshot = self._snapshot(state)
        except StoreError:
            raise
        except Exception as error:
            raise SaveFailed(step, "while copying the state", error) from error
        attempt = max(1, len(Course.of(healing).attempts))
        return StateCopy(step, snapshot, healing_bytes, time.time(), attempt)

    def release(self, copy: StateCopy) -> None:
        """Makes the memory of a copy available to the next copy."""
        self._spare.append(copy.snapshot)

    def nonfinite_in(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the arrays in a state that hold NaN or Inf, allowed or not."""
        snapshot = self._snapshot(state)
        try:
            snapshot.settle()
            return inspection.nonfinite(snapshot.blocks())
        finally:
            self._spare.append(snapshot)  # the first save reuses it

    def _snapshot(self, state: Mapping[str, Any]) -> Any:
        spare = self._spare.popleft() if self._spare else None
        try:
            return self.take(state, spare)
        except Exception:
            if spare is not None:
                self._spare.append(spare)
            raise

    # -- restoring ------------------------------------------------------------------------------

    def flatten_matching(
        self, step: int | None, saved: Mapping[str, Mapping[str, Any]], like: Mapping[str, Any]
    ) -> Flat:
        """Flattens the live state; StateMismatch if the saved entries do not fit it.

        Trees must have the same arrays. For objects with `state_dict` only names and identities are
        compared: a fresh optimizer has no moments yet, and `load_state_dict` checks the rest.
        """
        flat = self.flatten(like, live=True)
        wrong = [f'"{name}" is missing in the saved state' for name in like if name not in saved]
        for name, entry in flat.entries.items():
            if name not in saved:
                continue
            if is_stateful(entry):
                if "identity" in entry and "identity" in saved[name]:
                    wrong += _differences(saved[name]["identity"], entry["identity"])
            elif "leaves" in entry and "leaves" not in saved[name]:
                wrong.append(f'"{name}" was an object with state_dict')
            else:
                wrong += _differences(array_types(name, saved[name]), array_types(name, entry))
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
        """Builds a state from its saved entries and `arrays`.

        `live` is `like` flattened; it gives PyTreeDefs and devices.
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

    def restore(self, snapshot: Any, like: Mapping[str, Any], copy: CopyBlocks) -> dict[str, Any]:
        """The state in fresh memory, on the devices of `like`; StateMismatch if it does not fit."""
        saved = snapshot.flat.entries
        like = protocol.values_to_restore(saved, like)
        if not like:
            return {}
        live = self.flatten_matching(None, saved, like)
        entries = {name: saved[name] for name in like}
        arrays = self.copies(snapshot, set(nodes_of(entries)), live, copy)
        return self.assemble(entries, arrays, like, live)


def _differences(saved: Mapping[str, str], live: Mapping[str, str]) -> list[str]:
    wrong = [f"{key} is missing in the saved state" for key in live if key not in saved]
    wrong += [f"{key} is missing in the live state" for key in saved if key not in live]
    for key in live.keys() & saved.keys():
        if saved[key] != live[key]:
            wrong.append(f"{key} is {saved[key]} in the saved and {live[key]} in the live state")
    return sorted(wrong)
