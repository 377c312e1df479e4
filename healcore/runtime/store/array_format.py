"""`ArrayFormat`: how the arrays of a framework are copied, written, read and restored.

    live state ── flatten ──► FlatState ── copy ──► HostCopy ── inspect ──► digests, NaN and Inf
    (of the framework)        structures,           arrays in              │
                              arrays not copied     host memory            ├── ring (memory)
                                                                           └── write (directory)

    saved entries ── match ──► Target ── read ──► arrays ── assemble ──► state for `Driver.load`
    live state ─────────┘      (from the directory; `restore` does both from a copy in memory)

Everything that does not depend on the framework is in the base class. A new format implements the
abstract methods.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from healcore.runtime.store import files, host_memory, small_file, values
from healcore.runtime.store.checkpoints import (
    AttemptHistory,
    SaveFailed,
    StateMismatch,
    StoreError,
)
from healcore.runtime.store.flat_state import (
    Entries,
    FlatState,
    FrameworkArray,
    Leaf,
    NamedState,
    Part,
    ShardPlace,
    Value,
    parts_of,
    raw,
)
from healcore.runtime.store.host_copy import (
    Copied,
    HostCopy,
    Record,
    checked_step,
    sealed_record,
)
from healcore.runtime.store.mismatches import is_stateful, mismatches


class Target(NamedTuple):
    """Saved entries, and the live values that they are restored into.

    The saved side says what to read, and the live side says where the arrays belong: on which
    device, and how they are sharded. Both may differ from what they were at the save.
    """

    entries: dict[str, Any]
    """Name -> saved structure, see `Entries`."""
    live: dict[str, Value]
    """Name -> live value. The same names."""
    flat: FlatState
    """The live values, flattened; gives shapes, dtypes, shardings and devices."""

    @property
    def arrays(self) -> dict[str, dict[str, Any]]:
        """Name -> node of every saved array."""
        found: dict[str, dict[str, Any]] = {}
        for entry in self.entries.values():
            for node in values.arrays_of(entry):
                found[node["name"]] = node
        return found


class ArrayFormat(ABC):
    """Copies, writes and reads the arrays of a framework.

    The memory of a released copy is reused for the next copy: the first touch of every page of
    fresh memory makes a copy up to three times slower.
    """

    name: str
    """Format of the files, for the manifest."""
    small_bytes: int = small_file.MAX_BYTES
    """Largest size of a state whose arrays one process saves as one file; -1 for never."""
    _spare: FlatState | None = None

    @abstractmethod
    def add(self, flat: FlatState, name: str, value: Value) -> None:
        """Adds the entry of a value and its arrays, not copied, to a flat state.

        Args:
            flat: the flat state to extend.
            name: name of the value in the state.
            value: a tree of arrays and Python values, or an object with `state_dict`.

        Raises:
            UnsavableState: the value cannot be saved.
        """

    @abstractmethod
    def copy_parts(
        self, parts: Sequence[Part], old: Sequence[Part]
    ) -> tuple[Sequence[Part], Copied]:
        """Copies parts to arrays in host memory.

        Args:
            parts: the parts, on any device.
            old: parts in host memory that are not needed any more. A copy is made in the memory of
                an old part that has the same layout.

        Returns:
            The copies in the order of `parts`, and a function that waits for them.
        """

    @abstractmethod
    def array(self, leaf: Leaf, live: Leaf | None) -> FrameworkArray:
        """The framework's array of a leaf in host memory.

        Args:
            leaf: the array. Its memory is fresh, so the result may use it.
            live: the live array, which gives sharding and device, or None if there is none.
        """

    @abstractmethod
    def decode_array(
        self, node: Mapping[str, Any], array: FrameworkArray, live: Leaf | None
    ) -> Value:
        """The value of an array node whose array has been read.

        Args:
            node: the content of the node, with the kind of the value.
            array: the array that was read.
            live: the live array, which gives the device. None if `load_state_dict` moves the value.
        """

    @abstractmethod
    def write(self, copy: HostCopy, folder: Path) -> None:
        """Writes the arrays of a copy. Runs in the background, on every rank.

        Args:
            copy: the inspected copy.
            folder: a directory that does not exist yet. All ranks write below it.
        """

    @abstractmethod
    def read(self, folder: Path, target: Target) -> dict[str, FrameworkArray]:
        """Reads the arrays of verified files into fresh memory, on every rank.

        Args:
            folder: the folder that `write` has written, whose digests are right.
            target: the entries to read, and the live values with their shardings.

        Returns:
            Name -> array, for each of `target.arrays`.
        """

    def flatten(self, state: NamedState) -> FlatState:
        """Separates a state into its structure and its arrays, which are not copied.

        Args:
            state: name -> value.

        Raises:
            StoreError: the state is empty or no mapping, or a name is no string.
            UnsavableState: a value cannot be saved.
        """
        if not isinstance(state, Mapping) or not state:
            raise StoreError(
                "the state to save is a non-empty mapping of names to values, as in "
                f'{{"state": state}}, not {state!r:.60}'
            )
        flat = FlatState()
        for name, value in state.items():
            if not isinstance(name, str):
                raise StoreError(f"names in the state are strings, not {name!r}")
            self.add(flat, name, value)
        return flat

    def sizes(self, state: NamedState) -> tuple[int, int]:
        """The size of a state's arrays in bytes, before it is copied.

        Returns:
            Bytes of all ranks together, and bytes in the memory of this process.

        Raises:
            StoreError: the state cannot be saved.
        """
        flat = self.flatten(state)
        whole, local = 0, 0
        for entry in flat.entries.values():
            for node in values.arrays_of(entry):
                parts = [*flat.leaves[node["name"]].parts.values()]
                own = sum(part.nbytes for part in parts)
                local += own
                elements = sum(math.prod(part.shape) for part in parts)
                size = math.prod(node["shape"])
                if 0 < elements < size:  # this process has a part of the array
                    own = own * size // elements
                whole += own
        return whole, local

    def copy(self, step: int, state: NamedState, record: Record | None) -> HostCopy:
        """Copies a state to host memory, in the memory of the last released copy if that fits.

        The copies from an accelerator are still running when it returns; `inspect` waits for them.
        See `CheckpointStore.save` for the arguments and errors.
        """
        step = checked_step(step)
        sealed = None
        if record is not None:
            sealed = sealed_record(record)
        spare, self._spare = self._spare, None
        try:
            flat = self.flatten(state)
            copied = self._copy_leaves(flat, spare)
        except StoreError:
            raise
        except Exception as error:
            raise SaveFailed(step, "while copying the state", error) from error
        return HostCopy(step, flat, copied, sealed, max(1, len(AttemptHistory.of(record).starts)))

    def _copy_leaves(self, flat: FlatState, spare: FlatState | None) -> Copied:
        """Replaces the arrays by copies in host memory, in the memory of `spare` if that fits.

        Returns a function that waits for the copies.
        """
        copies, copied = self.copy_parts(parts_of(flat), parts_of(spare))
        following = iter(copies)
        for leaf in flat.leaves.values():
            leaf.parts = {place: next(following) for place in leaf.parts}
        return copied

    def release(self, copy: HostCopy) -> None:
        """Makes the memory of a copy available to the next copy. The copy is not used any more."""
        self._spare = copy.flat

    def inspect(self, copy: HostCopy) -> tuple[str, ...]:
        """Computes the digests of a copy, and looks for NaN and Inf in the same pass.

        Waits for the copies from an accelerator first.

        Returns:
            The names of all arrays with NaN or Inf, allowed or not.
        """
        copy.copied()
        nonfinite: dict[str, None] = {}  # in order, each name once
        for leaf in copy.flat.leaves.values():
            for place, part in leaf.parts.items():
                leaf.digests[place], is_finite = host_memory.digest(raw(part), leaf.dtype)
                if not is_finite:
                    nonfinite[leaf.name] = None
        return tuple(nonfinite)

    def check(self, copy: HostCopy) -> None:
        """Recomputes the digests of an inspected copy in memory.

        Raises:
            CheckpointDamaged: a digest differs from the digest of the inspection.
        """
        for leaf in copy.flat.leaves.values():
            for place, part in leaf.parts.items():
                digest, _ = host_memory.digest(raw(part))
                copy.verify(leaf, place, digest)

    def nonfinite_in(
        self, state: NamedState, names: Collection[str] | None = None
    ) -> tuple[str, ...]:
        """Names of the arrays in a state that hold NaN or Inf, allowed or not.

        Args:
            state: name -> value.
            names: names of the arrays to look at, or None for all. Only these are copied, and not
                into the memory that the next save reuses.
        """
        if names is not None:
            flat = self.flatten(state)
            flat.leaves = {name: leaf for name, leaf in flat.leaves.items() if name in names}
            copied = self._copy_leaves(flat, None)
            return self.inspect(HostCopy(0, flat, copied, record=None, attempt=1))
        copy = self.copy(0, state, None)
        try:
            return self.inspect(copy)
        finally:
            self.release(copy)  # the first save reuses it

    def match(self, step: int, saved: Entries, like: NamedState) -> Target:
        """Finds what to restore of a checkpoint, and checks that it fits the live state.

        JAX trees must have the same arrays. For objects with `state_dict` only names and identities
        are compared: a fresh optimizer has no moments yet, and `load_state_dict` checks the rest.

        Args:
            step: step of the checkpoint, for the message.
            saved: the entries of the checkpoint, or of its copy in memory.
            like: the live values. Of these, optional values may be missing in the checkpoint.

        Returns:
            The part of the saved entries for the live values.

        Raises:
            StateMismatch: the checkpoint does not fit.
        """
        live: dict[str, Value] = {}
        for name, value in like.items():
            if name in saved or getattr(value, "optional", False) is not True:
                live[name] = value
        flat = FlatState()
        if live:
            flat = self.flatten(live)
        wrong: list[str] = []
        for name in live:
            if name not in saved:
                wrong.append(f'"{name}" is missing in the saved state')
        for name, entry in flat.entries.items():
            if name in saved:
                wrong += mismatches(name, saved[name], entry)
        if wrong:
            raise StateMismatch(step, wrong)
        return Target({name: saved[name] for name in live}, live, flat)

    def assemble(self, target: Target, arrays: Mapping[str, FrameworkArray]) -> dict[str, Value]:
        """Builds a state from its saved entries and their arrays.

        Args:
            target: result of `match`.
            arrays: name -> array, for each of `target.arrays`.

        Returns:
            Name -> value, or the argument of `load_state_dict` for an object with `state_dict`.
        """
        state: dict[str, Value] = {}
        for name, entry in target.entries.items():
            is_loaded = is_stateful(entry) or hasattr(target.live[name], "state_dict")
            live: Mapping[str, Leaf] = {}
            if not is_loaded:
                live = target.flat.leaves
            fetch = partial(self._fetch, arrays, live)
            if "leaves" in entry:
                leaves = [values.decode(node, fetch) for _, node in entry["leaves"]]
                state[name] = target.flat.treedefs[name].unflatten(leaves)
            else:
                state[name] = values.decode(entry["tree"], fetch)
        return state

    def _fetch(
        self,
        arrays: Mapping[str, FrameworkArray],
        live: Mapping[str, Leaf],
        tag: str,
        content: Any,
    ) -> Value:
        """Decodes a node that `values.decode` cannot decode by itself: an array, mostly."""
        if tag != "array":
            return values.decode_other(tag, content)
        name = content["name"]
        return self.decode_array(content, arrays[name], live.get(name))

    def restore(self, copy: HostCopy, like: NamedState) -> dict[str, Value]:
        """The state of an inspected copy in fresh memory, on the devices of the live values.

        Every part is verified while it is copied. The memory is fresh, because the copy stays in
        the ring and may be restored again.

        Args:
            copy: the inspected copy, which is not changed.
            like: the live values, which say where the arrays belong.

        Raises:
            StateMismatch: the state does not fit.
            CheckpointDamaged: a digest differs.
        """
        target = self.match(copy.step, copy.flat.entries, like)

        def verified_copy(leaf: Leaf) -> Leaf:
            parts: dict[ShardPlace, Part] = {}
            for place, part in leaf.parts.items():
                fresh = host_memory.allocate(part.nbytes)
                digest, _ = host_memory.digest(raw(part), into=fresh)
                copy.verify(leaf, place, digest)
                parts[place] = fresh.view(part.dtype).reshape(part.shape)
            return replace(leaf, parts=parts)

        saved = [copy.flat.leaves[name] for name in target.arrays]
        arrays: dict[str, FrameworkArray] = {}
        for leaf in files.map_in_threads(verified_copy, saved, copy.nbytes):
            arrays[leaf.name] = self.array(leaf, target.flat.leaves.get(leaf.name))
        return self.assemble(target, arrays)
