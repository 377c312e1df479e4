"""`ArrayFormat`: how the arrays of a framework are copied, written, read and restored.

    live state ── flatten ──► FlatState ── copy ──► HostCopy ── inspect ──► NaN and Inf
    (of the framework)        structures,           arrays in              │
                              arrays not copied     host memory            ├── kept in memory
                                                                           └── write (directory)

    saved entries ── match ──► Target ── read ──► arrays ── assemble ──► state for `Driver.load`
    live state ─────────┘      (from a directory, or `from_memory`)

Everything that does not depend on the framework is in the base class. A new format implements the
abstract methods.

DCP and Orbax make several files and threads for each checkpoint. For a state of kilobytes that
takes more of the processor than all the rest of a save. So the arrays of such a state are one file
of safetensors in their place, which the library writes and reads:

    safetensors.torch.load_file("step-0000000140.1/data/arrays.safetensors")["model.0.weight"]
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors

from healcore import regular_file
from healcore.runtime.store import values
from healcore.runtime.store.checkpoints import (
    AttemptHistory,
    SaveFailed,
    StateMismatch,
    StoreError,
)
from healcore.runtime.store.files import map_in_threads, seal, unseal

Entries = Mapping[str, Mapping[str, Any]]
"""Name in the state -> structure. In torch: {"tree": node} with "stateful" and "per_rank", and
"identity" (part -> text that must be equal) for optimizers and schedulers. In JAX: {"tree": node}
for an object with `state_dict`, {"leaves": [[path, node], …]} for a pytree."""
Record = Mapping[str, Any]
"""The record of a run, JSON-safe."""
SMALL_FILE = "arrays.safetensors"
"""Name of the file of a small state in the directory of the arrays."""
_MAX_SMALL_FILE = 1 << 28
"""Largest size of such a file that is read, with the names of the arrays."""
_PIECE_BYTES = 1 << 19
"""Size of a piece in bytes. It stays in a core's cache, so a second read of it costs no memory
bandwidth."""
_INFINITY = {
    "float16": (2, 0x7C00),
    "bfloat16": (2, 0x7F80),
    "float32": (4, 0x7F80_0000),
    "float64": (8, 0x7FF0_0000_0000_0000),
    "complex32": (2, 0x7C00),
    "complex64": (4, 0x7F80_0000),
    "complex128": (8, 0x7FF0_0000_0000_0000),
    "float8_e4m3fn": (1, 0x7F),
    "float8_e5m2": (1, 0x7C),
}
"""Format -> size of a number in bytes, and the bits of infinity. `float8_e4m3fn` has no Inf: its
bits are the bits of its one NaN. Other formats (integers, rare floats of 8 bits and less) are not
inspected."""


@dataclass(eq=False)
class Leaf:
    """One array of a state.

    A sharded array has a part for each shard that this process has. A process saves only its own
    parts, and the ranks together save the whole array.
    """

    name: str
    """Name of the array in the whole state, such as `optimizer.state.0.exp_avg`."""
    dtype: str
    """Name of the dtype, such as "bfloat16"."""
    shape: tuple[int, ...]
    """Shape of the whole array."""
    parts: dict[Any, Any]
    """Place of a part in its array -> the part in this process, an array of the framework or of
    NumPy with `shape`, `dtype` and `nbytes`. A whole array has one part. The format chooses what a
    place is."""
    layout: Any = None
    """The framework's description of the sharding."""


class FlatState:
    """A state as JSON-safe structures and named arrays, which `ArrayFormat.flatten` collects.

    The structures go into a JSON file, and the arrays into files of the framework. A name connects
    the two: the structure has it in place of the array.
    """

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = {}
        """See `Entries`."""
        self.leaves: dict[str, Leaf] = {}
        """Name of an array -> the array."""
        self.treedefs: dict[str, Any] = {}
        """Name -> PyTreeDef in JAX. It is not saved: a restore uses the structure of the live
        pytrees."""

    @property
    def parts(self) -> list[Any]:
        """The parts of all arrays, in order."""
        return [part for leaf in self.leaves.values() for part in leaf.parts.values()]

    def add(
        self,
        path: values.Path,
        kind: str,
        dtype: str,
        shape: Sequence[int],
        parts: dict[Any, Any],
        layout: Any = None,
    ) -> dict[str, Any]:
        """Adds an array.

        Args:
            path: its place in the state.
            kind: what the program has there, such as "numpy".
            dtype: name of the dtype, such as "bfloat16".
            shape: shape of the whole array.
            parts: its parts in this process, not copied.
            layout: how it is sharded, or None.

        Returns:
            The content of its node. Its name is like `optimizer.state.0.exp_avg`. If two paths give
            the same name, because a key has a dot, the second name gets a number.
        """
        plain = ".".join(map(str, path))
        name, number = plain, 1
        while name in self.leaves:
            number += 1
            name = f"{plain}#{number}"
        self.leaves[name] = Leaf(name, dtype, tuple(shape), parts, layout)
        return {"name": name, "kind": kind, "dtype": dtype, "shape": list(shape)}


@dataclass(eq=False)
class HostCopy:
    """A copy of the state after one step in host memory.

    The training changes its arrays at the next step, while the copy is inspected and written in the
    background. So a save costs the training only the time of one copy:

        training    step ── copy ── step ── step ── step ── ...
                             │
        background           └── inspect ── keep in memory ── write to the directory
    """

    step: int
    """Number of optimizer steps that the state has had."""
    flat: FlatState
    """The state, with its arrays in host memory."""
    copied: Callable[[], object]
    """Waits for the copies from an accelerator, which are asynchronous."""
    record: bytes | None
    """The sealed record of the run, or None."""
    history: AttemptHistory
    """The attempts in the record."""
    attempt: int
    """Number of the attempt that saves the state, from 1."""
    created: float = field(default_factory=time.time)
    """Wall-clock seconds since 1970."""
    nonfinite: tuple[str, ...] = ()
    """Names of the arrays with NaN or Inf on any rank, allowed or not."""
    is_inspected: bool = False
    """Whether these names are known."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return sum(part.nbytes for part in self.flat.parts)

    @property
    def unsealed_record(self) -> dict[str, Any] | None:
        """A fresh copy of the record, or None without one."""
        if self.record is None:
            return None
        return unseal(self.record)


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
        nodes = values.arrays_of([*self.entries.values()])
        return {node["name"]: node for node in nodes}


class ArrayFormat(ABC):
    """Copies, writes and reads the arrays of a framework.

    The memory of a released copy is reused for the next copy: the first touch of every page of
    fresh memory makes a copy up to three times slower.
    """

    name: str
    """Format of the files: stores of a list have the same."""
    small_bytes: int = 16 << 20
    """Largest size of a state whose arrays one process saves as one file; -1 for never. Above it
    the fixed cost of DCP and Orbax is small compared with the copying."""
    small_dtypes: frozenset[str] = frozenset({
        "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32",
        "float64", "float8_e4m3fn", "float8_e5m2",
    })  # fmt: skip
    """Dtypes in such a file: those that each version of safetensors reads and writes."""
    world: int = 1
    """Number of ranks that save together."""
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
    def on_host(self, part: Any) -> np.ndarray | None:
        """A view of a part in host memory, of any shape, or None for a part on a device."""

    @abstractmethod
    def copy_from_devices(
        self, parts: Sequence[Any], old: Sequence[Any]
    ) -> tuple[Sequence[Any], Callable[[], object]]:
        """Begins copies of parts to host memory.

        Args:
            parts: parts on devices.
            old: for each an old copy that is not needed any more and may be overwritten, or None.

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
    def write_small(self, flat: FlatState, path: Path) -> None:
        """Writes whole arrays as a file of safetensors."""

    @abstractmethod
    def array_of_bytes(self, data: np.ndarray, node: Mapping[str, Any]) -> Any:
        """A fresh array of the bytes in such a file, uint8 (n,). Raises ValueError for others."""

    @abstractmethod
    def write_large(self, flat: FlatState, folder: Path) -> None:
        """Writes the arrays of a copy. Runs in the background, on every rank.

        Args:
            flat: the state of an inspected copy.
            folder: a directory that does not exist yet. All ranks write below it.
        """

    @abstractmethod
    def read_large(self, folder: Path, target: Target) -> dict[str, Any]:
        """Reads the arrays of verified files into fresh memory, on every rank.

        Args:
            folder: the folder that `write_large` has written, whose digests are right.
            target: the entries to read, and the live values with their shardings.

        Returns:
            Name -> array, for each of `target.arrays`.
        """

    # -- a save -----------------------------------------------------------------------------------

    def flatten(self, state: Mapping[str, Any]) -> FlatState:
        """Separates a state into its structure and its arrays, which are not copied.

        Args:
            state: name -> value.

        Raises:
            StoreError: the state is empty or no mapping, or a name is no string.
            UnsavableState: a value cannot be saved.
        """
        named = isinstance(state, Mapping) and all(isinstance(name, str) for name in state)
        if not named or not state:
            raise StoreError(
                "the state to save is a non-empty mapping of names to values, as in "
                f'{{"state": state}}, not {state!r:.60}'
            )
        flat = FlatState()
        for name, value in state.items():
            self.add(flat, name, value)
        return flat

    def copy(self, step: int, state: Mapping[str, Any], record: Record | None) -> HostCopy:
        """Copies a state to host memory, in the memory of the last released copy if that fits.

        The copies from an accelerator are still running when it returns; `inspect` waits for them.
        See `CheckpointStore.save` for the arguments and errors.
        """
        if not hasattr(step, "__index__") or int(step) < 0:
            raise StoreError(f"step is a whole number >= 0, not {step!r}: pass the optimizer step")
        step = int(step)
        sealed = None if record is None else sealed_record(record)
        try:
            flat = self.flatten(state)
            copied = self._copy_leaves(flat)
        except StoreError:
            raise
        except Exception as error:
            raise SaveFailed(step, "while copying the state", error) from error
        history = AttemptHistory.of(record)
        return HostCopy(step, flat, copied, sealed, history, max(1, len(history.starts)))

    def _copy_leaves(self, flat: FlatState) -> Callable[[], object]:
        """Replaces the arrays by copies in host memory. Returns a function that waits for them."""
        spare, self._spare = self._spare, None
        old = iter(spare.parts if spare else ())
        on_host: list[tuple[np.ndarray, np.ndarray]] = []
        on_devices: list[tuple[Leaf, Any, Any]] = []
        for leaf in flat.leaves.values():
            for place, part in leaf.parts.items():
                # Part by part: the written rows of a replay buffer grow, and the weights do not.
                memory = next(old, None)
                if memory is not None and memory.nbytes != part.nbytes:
                    memory = None
                source = self.on_host(part)
                if source is None:
                    on_devices.append((leaf, place, memory))
                    continue
                if not isinstance(memory, np.ndarray):
                    memory = np.empty(source.nbytes, np.uint8)
                leaf.parts[place] = raw(memory).view(source.dtype).reshape(source.shape)
                on_host.append((leaf.parts[place], source))
        nbytes = sum(source.nbytes for _, source in on_host)
        map_in_threads(lambda pair: np.copyto(*pair), on_host, nbytes)
        parts = [leaf.parts[place] for leaf, place, _ in on_devices]
        copies, copied = self.copy_from_devices(parts, [memory for *_, memory in on_devices])
        for (leaf, place, _), copy in zip(on_devices, copies, strict=True):
            leaf.parts[place] = copy
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

    def nonfinite_in(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the arrays in a state that hold NaN or Inf, allowed or not.

        Args:
            state: name -> value.
        """
        flat = self.flatten(state)
        self._copy_leaves(flat)()
        self.release(flat)  # the next save reuses it
        return _nonfinite(flat)

    def write(self, copy: HostCopy, folder: Path) -> None:
        """Writes the arrays of an inspected copy. Runs in the background, on every rank.

        Args:
            copy: the copy.
            folder: a directory that does not exist yet. All ranks write below it.
        """
        is_small = self.world == 1 and copy.nbytes <= self.small_bytes
        for leaf in copy.flat.leaves.values():
            # The key of the metadata is no name of an array, and JSON holds no half of a surrogate
            # pair. An array with other strides is converted, and a part of one is no array.
            is_small = is_small and leaf.dtype in self.small_dtypes and self.is_whole(leaf)
            is_small = is_small and leaf.name.isascii() and leaf.name != "__metadata__"
        if is_small:
            folder.mkdir()
            self.write_small(copy.flat, folder / SMALL_FILE)
        else:
            self.write_large(copy.flat, folder)

    def is_whole(self, leaf: Leaf) -> bool:
        """Whether this process has all of an array."""
        del leaf
        return True

    # -- a restore --------------------------------------------------------------------------------

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

    def read_small(self, folder: Path, target: Target) -> dict[str, Any] | None:
        """The arrays of a small file, by name. None for a folder without such a file.

        Args:
            folder: the folder that `write` has written, whose digests are right.
            target: result of `match`.

        Raises:
            OSError: the file cannot be read.
            SafetensorError: the library rejects the file.
            ValueError: an array is not as it was saved.
        """
        data = bytes_of_small_file(folder)
        if data is None:
            return None
        nodes = target.arrays.items()
        return {name: self.array_of_bytes(data[name], node) for name, node in nodes}

    def from_memory(self, copy: HostCopy, target: Target) -> dict[str, Any]:
        """The arrays of a copy in fresh memory: the copy stays, and may be restored again.

        Args:
            copy: an inspected copy, which is not changed.
            target: result of `match`.

        Returns:
            Name -> array, for each of `target.arrays`.
        """

        def fresh(name: str) -> tuple[str, Any]:
            leaf = copy.flat.leaves[name]
            parts: dict[Any, Any] = {}
            for place, part in leaf.parts.items():
                parts[place] = raw(part).copy().view(part.dtype).reshape(part.shape)
            return name, self.array(replace(leaf, parts=parts), target.flat.leaves.get(name))

        return dict(map_in_threads(fresh, target.arrays, copy.nbytes))

    def assemble(self, target: Target, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Builds a state from its saved entries and their arrays.

        Args:
            target: result of `match`.
            arrays: name -> array, for each of `target.arrays`.

        Returns:
            Name -> value, or the argument of `load_state_dict` for an object with `state_dict`.
        """

        def fetch(live: Mapping[str, Leaf], tag: str, content: Any) -> Any:
            if tag != "array":
                return values.decode_other(tag, content)
            name = content["name"]
            return self.decode_array(content, arrays[name], live.get(name))

        state: dict[str, Any] = {}
        for name, entry in target.entries.items():
            is_loaded = _is_stateful(entry) or hasattr(target.live[name], "state_dict")
            decode = partial(fetch, {} if is_loaded else target.flat.leaves)
            if "leaves" in entry:
                leaves = [values.decode(node, decode) for _, node in entry["leaves"]]
                state[name] = target.flat.treedefs[name].unflatten(leaves)
            else:
                state[name] = values.decode(entry["tree"], decode)
        return state


def bytes_of_small_file(folder: Path) -> dict[str, np.ndarray] | None:
    """The bytes of each array in the file of a small state, uint8 (n,), by name; or None."""
    path = folder / SMALL_FILE
    if not path.exists():
        return None
    found = safetensors.deserialize(regular_file.read(path, _MAX_SMALL_FILE))
    return {name: np.frombuffer(entry["data"], np.uint8) for name, entry in found}


def raw(part: Any) -> np.ndarray:
    """The bytes of a part in host memory.

    Returns:
        The bytes, uint8 (n,). They share the memory of the part if its elements are in order.
    """
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)


def finite(data: np.ndarray, dtype: str) -> bool:
    """Whether an array's bytes, uint8 (n,), hold no NaN or Inf; `dtype` is a name: "bfloat16".

    A number is NaN or Inf exactly if all bits of its exponent are ones. The bits without the sign,
    as an integer, are then at least the bits of infinity. This test needs no bfloat16 type, raises
    no warnings and allocates nothing.
    """
    if dtype not in _INFINITY:
        return True
    size, infinity = _INFINITY[dtype]
    for at in range(0, len(data), _PIECE_BYTES):
        piece = data[at : at + _PIECE_BYTES]
        # Two maxima: the signed maximum finds positive numbers, the unsigned one negative numbers.
        # One maximum over the bits without the sign would need fresh memory, which takes longer.
        positive, negative = piece.view(f"i{size}").max(), piece.view(f"u{size}").max()
        if positive >= infinity or negative >= infinity | 1 << 8 * size - 1:
            return False
    return True


def sealed_record(record: Record) -> bytes:
    """The record of a run as bytes for a file, see `files.seal`.

    Raises:
        StoreError: the record is not JSON-safe.
    """
    try:
        return seal(record)
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"the record must be JSON-safe ({error}): pass the adapter's to_dict()"
        ) from None


def _nonfinite(flat: FlatState) -> tuple[str, ...]:
    """The names of the arrays in host memory with NaN or Inf."""
    found: list[str] = []
    for leaf in flat.leaves.values():
        if not all(finite(raw(part), leaf.dtype) for part in leaf.parts.values()):
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
    if ("leaves" in saved) != ("leaves" in live):
        return [f'"{name}" is a pytree in one, and has state_dict in the other']
    before, now = saved.get("identity", {}), live.get("identity", {})
    must_be_equal = before.keys() | now.keys() if before and now else set()
    if not _is_stateful(live):
        before, now = _array_types(name, saved), _array_types(name, live)
        # Dictionaries and lists of a torch program may grow and shrink.
        must_be_equal = before.keys() | now.keys() if "leaves" in live else before.keys() & now
    wrong: list[str] = []
    for key in sorted(must_be_equal):
        old, new = before.get(key, "missing"), now.get(key, "missing")
        if old != new:
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
