"""Copies of a state in host memory, which stores check, write and restore from."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from healcore.runtime.store import checksummed_json, inspection, protocol
from healcore.runtime.store.course import Course
from healcore.runtime.store.errors import SaveFailed, StateMismatch, StoreError
from healcore.runtime.store.inspection import Block, Inspection
from healcore.runtime.store.structure import (
    Flat,
    Leaf,
    array_types,
    decode,
    is_stateful,
    nodes_of,
)


@dataclass
class StateCopy:
    """A copy of the state after one step in host memory."""

    step: int
    flat: Flat
    """The state, with its leaves in host memory."""
    copied: Callable[[], None]
    """Waits for the copies from an accelerator, which are asynchronous."""
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
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return sum(part.nbytes for part in parts_of(self.flat))

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
            self.copied()
            return
        self.inspecting.result()
        if self.inspected is None:
            raise StoreError(f"the copy of step {self.step} could not be completed")


class Copier(ABC):
    """Copies states to host memory and back. Each framework has a subclass for its arrays.

    The memory of a released copy is reused for the next copy.
    """

    def __init__(self) -> None:
        self._spare: StateCopy | None = None

    # -- the framework's part -------------------------------------------------------------------

    @abstractmethod
    def flatten(self, state: Mapping[str, Any], *, live: bool = False) -> Flat:
        """The structure and arrays of a state, not copied; UnsavableState if it cannot be saved.

        A `live` state is only compared with a saved state: shapes may replace its arrays, and it
        may hold values that cannot be saved.
        """

    @abstractmethod
    def copy_parts(
        self, parts: Sequence[Any], old: Sequence[Any]
    ) -> tuple[list[Any], Callable[[], None]]:
        """Copies parts to host memory, in the memory of `old` if it has the same layout.

        Also returns a function that waits for the copies: those from an accelerator are
        asynchronous.
        """

    @abstractmethod
    def raw(self, part: Any) -> np.ndarray:
        """The bytes of a part in host memory, uint8 (n,), not copied."""

    @abstractmethod
    def view(self, raw: np.ndarray, part: Any) -> Any:
        """The bytes `raw` as an array with the dtype and layout of `part`."""

    @abstractmethod
    def array(self, leaf: Leaf, live: Leaf | None) -> Any:
        """The framework's array of a leaf in host memory, sharded like the live array."""

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
        spare, self._spare = self._spare, None
        try:
            flat = self.flatten(state)
            old = parts_of(spare.flat) if spare else []
            copies, copied = self.copy_parts(parts_of(flat), old)
        except StoreError:
            raise
        except Exception as error:
            raise SaveFailed(step, "while copying the state", error) from error
        flat = flat._replace(leaves=_with_parts(flat.leaves, copies))
        attempt = max(1, len(Course.of(healing).attempts))
        return StateCopy(step, flat, copied, healing_bytes, time.time(), attempt)

    def release(self, copy: StateCopy) -> None:
        """Makes the memory of a copy available to the next copy."""
        self._spare = copy

    def nonfinite_in(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the arrays in a state that hold NaN or Inf, allowed or not."""
        copy = self.copy(0, state, None)
        try:
            copy.settle()
            return self.inspect(copy.flat.leaves).nonfinite
        finally:
            self.release(copy)  # the first save reuses it

    def inspect(self, leaves: Mapping[str, Leaf]) -> Inspection:
        """Digests of leaves in host memory, and names of arrays with NaN or Inf."""
        return inspection.inspect(self.blocks(leaves))

    def blocks(self, leaves: Mapping[str, Leaf]) -> Iterator[Block]:
        """The bytes of the parts of leaves in host memory, in order."""
        for leaf in leaves.values():
            for place, part in leaf.parts.items():
                yield Block(leaf.name, leaf.dtype, self.raw(part), str(place))

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

    def restore(
        self, copy: StateCopy, like: Mapping[str, Any], changed: Callable[[str], Exception]
    ) -> dict[str, Any]:
        """The state of an inspected copy in fresh memory, on the devices of `like`.

        Raises:
            StateMismatch: the state does not fit.
            Exception: `changed(key)`, if the digest of a block differs.
        """
        saved = copy.flat.entries
        like = protocol.values_to_restore(saved, like)
        if not like:
            return {}
        live = self.flatten_matching(None, saved, like)
        entries = {name: saved[name] for name in like}
        leaves = {name: copy.flat.leaves[name] for name in nodes_of(entries)}
        raws = inspection.checked_copies([*self.blocks(leaves)], copy.digests, changed)
        old = [part for leaf in leaves.values() for part in leaf.parts.values()]
        fresh = _with_parts(leaves, map(self.view, raws, old))
        arrays = {name: self.array(leaf, live.leaves.get(name)) for name, leaf in fresh.items()}
        return self.assemble(entries, arrays, like, live)


def parts_of(flat: Flat) -> list[Any]:
    """The parts of all arrays, in order."""
    return [part for leaf in flat.leaves.values() for part in leaf.parts.values()]


def _with_parts(leaves: Mapping[str, Leaf], parts: Iterable[Any]) -> dict[str, Leaf]:
    """The same leaves with other parts."""
    following = iter(parts)
    return {
        name: leaf._replace(parts={place: next(following) for place in leaf.parts})
        for name, leaf in leaves.items()
    }


def _differences(saved: Mapping[str, str], live: Mapping[str, str]) -> list[str]:
    wrong = [f"{key} is missing in the saved state" for key in live if key not in saved]
    wrong += [f"{key} is missing in the live state" for key in saved if key not in live]
    for key in live.keys() & saved.keys():
        if saved[key] != live[key]:
            wrong.append(f"{key} is {saved[key]} in the saved and {live[key]} in the live state")
    return sorted(wrong)
