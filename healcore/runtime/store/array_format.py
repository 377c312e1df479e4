"""`ArrayFormat`: how the arrays of a framework are copied, written, read and restored.

    live state ── flatten ──► FlatState ── copy ──► HostCopy ── inspect ──► NaN and Inf
    (of the framework)        structures,           arrays in              │
                              arrays not copied     host memory            ├── ring (memory)
                                                                           └── write (directory)

    saved entries ── match ──► Target ── read ──► arrays ── assemble ──► state for `Driver.load`
    live state ─────────┘      (from the directory; `restore` does both from a copy in memory)

Everything that does not depend on the framework is in the base class. A new format implements the
abstract methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from healcore.runtime.store import files, host_memory, small_file, values
from healcore.runtime.store.checkpoints import (
    AttemptHistory,
    SaveFailed,
    StateMismatch,
    StoreError,
)
from healcore.runtime.store.state_copy import (
    Entries,
    FlatState,
    HostCopy,
    Leaf,
    Record,
    checked_step,
    raw,
    sealed_record,
)


class Target(NamedTuple):
    """Saved entries, and the live values that they are restored into.

    The saved side says what to read, and the live side says where the arrays belong: on which
    device, and how they are sharded. Both may differ from what they were at the save.
    """

    entries: dict[str, Any]
    """Name -> saved structure, see `Entries`."""
    live: dict[str, Any]
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
    def add(self, flat: FlatState, name: str, value: Any) -> None:
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
        self, parts: Sequence[Any], old: Sequence[Any]
    ) -> tuple[Sequence[Any], Callable[[], object]]:
        """Copies parts to arrays in host memory.

        Args:
            parts: the parts, on any device.
            old: parts in host memory that are not needed any more. A copy is made in the memory of
                an old part that has the same layout.

        Returns:
            The copies in the order of `parts`, and a function that waits for them.
        """

    @abstractmethod
    def array(self, leaf: Leaf, live: Leaf | None) -> Any:
        """The framework's array of a leaf in host memory.

        Args:
            leaf: the array. Its memory is fresh, so the result may use it.
            live: the live array, which gives sharding and device, or None if there is none.
        """

    @abstractmethod
    def decode_array(self, node: Mapping[str, Any], array: Any, live: Leaf | None) -> Any:
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
    def read(self, folder: Path, target: Target) -> dict[str, Any]:
        """Reads the arrays of verified files into fresh memory, on every rank.

        Args:
            folder: the folder that `write` has written, whose digests are right.
            target: the entries to read, and the live values with their shardings.

        Returns:
            Name -> array, for each of `target.arrays`.
        """

    def flatten(self, state: Mapping[str, Any]) -> FlatState:
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

    def copy(self, step: int, state: Mapping[str, Any], record: Record | None) -> HostCopy:
        """Copies a state to host memory, in the memory of the last released copy if that fits.

        The copies from an accelerator are still running when it returns; `inspect` waits for them.
        See `CheckpointStore.save` for the arguments and errors.
        """
        step = checked_step(step)
        sealed = None if record is None else sealed_record(record)
        spare, self._spare = self._spare, None
        try:
            flat = self.flatten(state)
            copied = self._copy_leaves(flat, spare)
        except StoreError:
            raise
        except Exception as error:
            raise SaveFailed(step, "while copying the state", error) from error
        return HostCopy(step, flat, copied, sealed, max(1, len(AttemptHistory.of(record).starts)))

    def _copy_leaves(self, flat: FlatState, spare: FlatState | None) -> Callable[[], object]:
        """Replaces the arrays by copies in host memory, in the memory of `spare` if that fits.

        Returns a function that waits for the copies.
        """
        copies, copied = self.copy_parts(flat.parts, spare.parts if spare else ())
        following = iter(copies)
        for leaf in flat.leaves.values():
            leaf.parts = {place: next(following) for place in leaf.parts}
        return copied

    def release(self, flat: FlatState) -> None:
        """Makes the memory of a copy available to the next copy. The copy is not used any more."""
        self._spare = flat

    def inspect(self, copy: HostCopy) -> tuple[str, ...]:
        """The names of the arrays of a copy with NaN or Inf, allowed or not.

        Waits for the copies from an accelerator first.
        """
        copy.copied()
        return _nonfinite(copy.flat)

    def nonfinite_in(
        self, state: Mapping[str, Any], names: Collection[str] | None = None
    ) -> tuple[str, ...]:
        """Names of the arrays in a state that hold NaN or Inf, allowed or not.

        Args:
            state: name -> value.
            names: names of the arrays to look at, or None for all. Only these are copied.
        """
        flat = self.flatten(state)
        if names is not None:
            flat.leaves = {name: leaf for name, leaf in flat.leaves.items() if name in names}
        self._copy_leaves(flat, None)()
        if names is None:
            self.release(flat)  # the first save reuses it
        return _nonfinite(flat)

    def match(self, step: int, saved: Entries, like: Mapping[str, Any]) -> Target:
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
        live: dict[str, Any] = {}
        for name, value in like.items():
            if name in saved or getattr(value, "optional", False) is not True:
                live[name] = value
        flat = self.flatten(live) if live else FlatState()
        wrong: list[str] = []
        for name, entry in flat.entries.items():
            if name not in saved:
                wrong.append(f'"{name}" is missing in the saved state')
            else:
                wrong += _mismatches(name, saved[name], entry)
        if wrong:
            raise StateMismatch(step, wrong)
        return Target({name: saved[name] for name in live}, live, flat)

    def assemble(self, target: Target, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Builds a state from its saved entries and their arrays.

        Args:
            target: result of `match`.
            arrays: name -> array, for each of `target.arrays`.

        Returns:
            Name -> value, or the argument of `load_state_dict` for an object with `state_dict`.
        """
        state: dict[str, Any] = {}
        for name, entry in target.entries.items():
            is_loaded = _is_stateful(entry) or hasattr(target.live[name], "state_dict")
            live = {} if is_loaded else target.flat.leaves
            fetch = partial(self._fetch, arrays, live)
            if "leaves" in entry:
                leaves = [values.decode(node, fetch) for _, node in entry["leaves"]]
                state[name] = target.flat.treedefs[name].unflatten(leaves)
            else:
                state[name] = values.decode(entry["tree"], fetch)
        return state

    def _fetch(
        self, arrays: Mapping[str, Any], live: Mapping[str, Leaf], tag: str, content: Any
    ) -> Any:
        """Decodes a node that `values.decode` cannot decode by itself: an array, mostly."""
        if tag != "array":
            return values.decode_other(tag, content)
        name = content["name"]
        return self.decode_array(content, arrays[name], live.get(name))

    def restore(self, copy: HostCopy, like: Mapping[str, Any]) -> dict[str, Any]:
        """The state of an inspected copy in fresh memory, on the devices of the live values.

        The memory is fresh, because the copy stays in the ring and may be restored again.

        Args:
            copy: the inspected copy, which is not changed.
            like: the live values, which say where the arrays belong.

        Raises:
            StateMismatch: the state does not fit.
        """
        target = self.match(copy.step, copy.flat.entries, like)

        def fresh(leaf: Leaf) -> Leaf:
            parts: dict[Any, Any] = {}
            for place, part in leaf.parts.items():
                memory = host_memory.allocate(part.nbytes)
                np.copyto(memory, raw(part))
                parts[place] = memory.view(part.dtype).reshape(part.shape)
            return replace(leaf, parts=parts)

        saved = [copy.flat.leaves[name] for name in target.arrays]
        arrays: dict[str, Any] = {}
        for leaf in files.map_in_threads(fresh, saved, copy.nbytes):
            arrays[leaf.name] = self.array(leaf, target.flat.leaves.get(leaf.name))
        return self.assemble(target, arrays)


def _nonfinite(flat: FlatState) -> tuple[str, ...]:
    """The names of the arrays in host memory with NaN or Inf."""
    found: list[str] = []
    for leaf in flat.leaves.values():
        if not all(host_memory.finite(raw(part), leaf.dtype) for part in leaf.parts.values()):
            found.append(leaf.name)
    return tuple(found)


def _is_stateful(entry: Mapping[str, Any]) -> bool:
    """Whether an entry is the state of an object with `state_dict`.

    Such an object receives its state by `load_state_dict`, which checks and moves the arrays. Any
    other value is built as a new object from its entry.
    """
    return entry.get("stateful", "tree" in entry)


def _mismatches(name: str, saved: Mapping[str, Any], live: Mapping[str, Any]) -> list[str]:
    """How a saved and a live entry of the same name differ, as sorted texts.

    Empty if the saved value can be restored into the live value.
    """
    if _is_stateful(live):
        before, now = saved.get("identity", {}), live.get("identity", {})
        must_be_equal = before.keys() | now.keys() if before and now else set()
    elif "leaves" in live:
        if "leaves" not in saved:
            return [f'"{name}" was an object with state_dict']
        before, now = _array_types(name, saved), _array_types(name, live)
        must_be_equal = before.keys() | now.keys()
    else:
        # A program's dictionaries and lists may grow and shrink: only common arrays are compared.
        before, now = _array_types(name, saved), _array_types(name, live)
        must_be_equal = before.keys() & now.keys()
    wrong: list[str] = []
    for key in sorted(must_be_equal):
        old, new = before.get(key), now.get(key)
        if old is None or new is None:
            which = "saved" if old is None else "live"
            wrong.append(f"{key} is missing in the {which} state")
        elif old != new:
            wrong.append(f"{key} is {old} in the saved and {new} in the live state")
    return wrong


def _array_types(name: str, entry: Mapping[str, Any]) -> dict[str, str]:
    """Place -> dtype and shape, which must be equal in a saved and a live entry.

    JAX and NumPy arrays may replace each other; random keys may not.
    """
    if "leaves" in entry:
        return {f"{name}{path}": _array_type(node) for path, node in entry["leaves"]}
    return {node["name"]: _array_type({"array": node}) for node in values.arrays_of(entry)}


def _array_type(node: values.Node) -> str:
    """Dtype and shape of a node, and the kind of a random key; "no array" for another value.

    A number is of one type, whether it is a Python number or an array without axes: a counter is a
    number at the start of a run, and an array after the first jitted step.
    """
    if isinstance(node, int | float):
        return "a number"
    if not isinstance(node, dict) or not node.keys() <= {"array", "float", "complex"}:
        return "no array"
    array = node.get("array", {"kind": "number", "shape": ()})
    if array["kind"] == "key":
        return f"{array['dtype']}{tuple(array['shape'])} {array['impl']} key"
    if not array["shape"]:
        return "a number"
    return f"{array['dtype']}{tuple(array['shape'])}"
