"""Copies of a state in host memory, which stores check, write and restore from."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from healcore.runtime.store import checksummed_json, inspection
from healcore.runtime.store.errors import CheckpointDamaged, SaveFailed, StateMismatch, StoreError
from healcore.runtime.store.inspection import Block, Inspection
from healcore.runtime.store.saved import Course
from healcore.runtime.store.structure import (
    Flat,
    Leaf,
    array_types,
    decode,
    is_stateful,
    nodes_of,
)

WHERE = "memory"
"""Place of a copy in messages."""


@dataclass(eq=False)
class StateCopy:
    """A copy of the state after one step in host memory."""

    step: int
    flat: Flat
    """The state, with its leaves in host memory."""
    copied: Callable[[], None]
    """Waits for the copies from an accelerator, which are asynchronous."""
    healing: bytes | None
    created: float
    attempt: int
    ready: threading.Event = field(default_factory=threading.Event)
    """Set when the copy is inspected, or has failed."""
    digests: dict[str, str] = field(default_factory=dict)
    """Key of a block -> digest, once the copy is inspected."""
    nonfinite: tuple[str, ...] = ()
    """Names of the arrays with NaN or Inf on any rank, allowed or not."""
    path: str | None = None
    """Directory of the checkpoint, or None while it is in memory only."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return sum(part.nbytes for part in parts_of(self.flat))

    @property
    def healing_state(self) -> dict[str, Any] | None:
        """A fresh copy of the healing state."""
        return None if self.healing is None else checksummed_json.loads(self.healing)


class Copier(ABC):
    """Copies states to host memory and back. Each framework has a subclass for its arrays.

    The memory of a released copy is reused for the next copy.
    """

    def __init__(self) -> None:
        self._spare: StateCopy | None = None

    # -- the framework's part -------------------------------------------------------------------

    @abstractmethod
    def flatten(self, state: Mapping[str, Any]) -> Flat:
        """The structure and arrays of a state, not copied; UnsavableState if it cannot be saved."""

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
        step = checked_step(step)
        healing_bytes = None if healing is None else encode_healing(healing)
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
            copy.copied()
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

    def match(
        self, step: int, saved: Mapping[str, Mapping[str, Any]], like: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], Flat]:
        """The saved entries, the live values, and the live values flattened, by name.

        Without optional values that the checkpoint lacks. Trees must have the same arrays. For
        objects with `state_dict` only names and identities are compared: a fresh optimizer has no
        moments yet, and `load_state_dict` checks the rest.

        Raises:
            StateMismatch: the checkpoint of `step` does not fit.
        """
        optional = [name for name in like if getattr(like[name], "optional", False) is True]
        live = {name: like[name] for name in like if name in saved or name not in optional}
        if not live:
            return {}, {}, Flat({}, {}, {})
        flat = self.flatten(live)
        wrong = [f'"{name}" is missing in the saved state' for name in live if name not in saved]
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
        return {name: saved[name] for name in live}, live, flat

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

    def check(self, copy: StateCopy) -> None:
        """Recomputes the digests of an inspected copy; CheckpointDamaged if one differs."""
        for name, digest in self.inspect(copy.flat.leaves).digests.items():
            if digest != copy.digests[name]:
                raise _damaged(copy, name)

    def restore(self, copy: StateCopy, like: Mapping[str, Any]) -> dict[str, Any]:
        """The state of an inspected copy in fresh memory, on the devices of `like`.

        Raises:
            StateMismatch: the state does not fit.
            CheckpointDamaged: a digest differs.
        """
        entries, like, live = self.match(copy.step, copy.flat.entries, like)
        leaves = {name: copy.flat.leaves[name] for name in nodes_of(entries)}
        blocks = [*self.blocks(leaves)]
        raws = inspection.checked_copies(blocks, copy.digests, lambda name: _damaged(copy, name))
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


def _damaged(copy: StateCopy, name: str) -> CheckpointDamaged:
    return CheckpointDamaged(copy.step, WHERE, name, "is not what was saved: its digest differs")


def checked_step(step: Any) -> int:
    """The step as an int; StoreError if it is not a whole number >= 0."""
    if isinstance(step, bool) or not hasattr(step, "__index__") or (number := int(step)) < 0:
        raise StoreError(f"step is a whole number >= 0, not {step!r}: pass the optimizer step")
    return number


def encode_healing(healing: Mapping[str, Any]) -> bytes:
    """The healing state as JSON bytes with a digest; StoreError if it is not JSON-safe."""
    try:
        return checksummed_json.dumps(healing)
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"the healing state must be JSON-safe ({error}): pass the adapter's to_dict()"
        ) from None
