"""`ArrayFormat`: how the arrays of a framework are copied, written, read and restored.

    live state ── copied ──► FlatState ── nonfinite ──► NaN and Inf
    (of the framework)       structures, arrays in     │
                             host memory               ├── kept in memory
                                                       └── write (directory)

    saved entries ── match ──► Target ── read ──► arrays ── assemble ──► state for `Driver.load`
    live state ─────────┘      (from a directory, or from a copy in memory)

Everything that does not depend on the framework is in the base class. A new format implements the
abstract methods.

DCP and Orbax make several files and threads for each checkpoint. For a state of kilobytes that
takes more of the processor than all the rest of a save. So the arrays of such a state are one file
of safetensors in their place:

    safetensors.torch.load_file("step-0000000140.1/data/arrays.safetensors")["model.0.weight"]

Read, the arrays of this file are the leaves of a copy in memory, and are restored like one.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors

from healcore import regular_file
from healcore.runtime.store import values
from healcore.runtime.store.checkpoints import StateMismatch, StoreError
from healcore.runtime.store.files import map_in_threads

Entries = Mapping[str, Mapping[str, Any]]
"""Name in the state -> structure. In torch: {"tree": node} with "stateful" and "per_rank", and
"identity" (part -> text that must be equal) for optimizers and schedulers. In JAX: {"tree": node}
for an object with `state_dict`, {"leaves": [[path, node], …]} for a pytree."""
SMALL_FILE = "arrays.safetensors"
"""Name of the file of a small state in the directory of the arrays."""
_MAX_SMALL_FILE = 1 << 28
"""Largest size of such a file that is read, with the names of the arrays."""
_PIECE_BYTES = 1 << 19
"""Size of a piece in bytes. It stays in a core's cache."""
_SAFETENSORS = {
    "int64": "I64", "uint64": "U64", "float64": "F64", "int32": "I32", "uint32": "U32",
    "float32": "F32", "int16": "I16", "uint16": "U16", "float16": "F16", "bfloat16": "BF16",
    "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""Format -> its name in a file of safetensors, in each version of the library. Large numbers come
first, so that in this order each array is aligned."""
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
    """Place of a part in its array -> the part in this process, an array of the framework, or of
    the host with `nbytes`. A whole array has one part. The format chooses what a place is."""
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
        self.wait: Callable[[], object] = bool
        """Waits for the copies of the arrays from an accelerator, which are asynchronous."""

    @property
    def nbytes(self) -> int:
        """Bytes of the parts of all arrays in this process."""
        return sum(part.nbytes for leaf in self.leaves.values() for part in leaf.parts.values())

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
    """Copies, writes and reads the arrays of a framework."""

    small_bytes: int = 16 << 20
    """Largest size of a state whose arrays one process saves as one file; -1 for never. Above it
    the fixed cost of DCP and Orbax is small compared with the copying."""
    world: int = 1
    """Number of ranks that save together."""

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
    def copy_parts(self, parts: Sequence[Any]) -> tuple[Sequence[Any], Callable[[], object]]:
        """Copies parts to host memory, or begins to if they are on an accelerator.

        Args:
            parts: the live parts.

        Returns:
            The copies in the order of `parts`, and a function that waits for them.
        """

    @abstractmethod
    def part_of_bytes(self, data: np.ndarray, node: Mapping[str, Any]) -> np.ndarray:
        """A part in host memory of the bytes of a whole array, uint8 (n,).

        Raises ValueError if their number is another one.
        """

    @abstractmethod
    def arrays(self, leaves: Mapping[str, Leaf], target: Target) -> dict[str, Any]:
        """The framework's arrays of leaves in host memory.

        Args:
            leaves: name -> leaf. Their memory is fresh, so the result may use it.
            target: the live state, which gives shardings and devices.
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

    def copied(self, state: Mapping[str, Any]) -> FlatState:
        """A state with its arrays in host memory, once its `wait` has returned.

        Args:
            state: name -> value.

        Raises:
            StoreError: see `flatten`.
        """
        flat = self.flatten(state)
        leaves = flat.leaves.values()
        copies, flat.wait = self.copy_parts([x for leaf in leaves for x in leaf.parts.values()])
        remaining = iter(copies)
        for leaf in leaves:
            leaf.parts = {place: next(remaining) for place in leaf.parts}
        return flat

    def write(self, flat: FlatState, folder: Path) -> None:
        """Writes the arrays of a copy. Runs in the background, on every rank.

        Args:
            flat: the state in host memory.
            folder: a directory that does not exist yet. All ranks write below it.
        """
        small = None
        if self.world == 1 and flat.nbytes <= self.small_bytes:
            small = _small_file(flat)
        if small is None:
            self.write_large(flat, folder)
        else:
            folder.mkdir()
            (folder / SMALL_FILE).write_bytes(small)

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
        if live:
            flat = self.flatten(live)
        else:
            flat = FlatState()
        wrong: list[str] = []
        for name, entry in flat.entries.items():
            if name not in saved:
                wrong.append(f'"{name}" is missing in the saved state')
            else:
                wrong += _mismatches(name, saved[name], entry)
        if wrong:
            raise StateMismatch(step, wrong)
        return Target({name: saved[name] for name in live}, live, flat)

    def from_host(self, leaves: Mapping[str, Leaf], target: Target) -> dict[str, Any]:
        """The arrays of leaves in fresh memory: the leaves stay, and may be restored again.

        Args:
            leaves: name -> leaf in host memory, which is not changed.
            target: result of `match`.

        Returns:
            Name -> array, for each of `target.arrays`.
        """

        def fresh(name: str) -> Leaf:
            parts = leaves[name].parts.items()
            return replace(leaves[name], parts={at: np.array(x, order="C") for at, x in parts})

        copies = map_in_threads(fresh, [*target.arrays], target.flat.nbytes)
        return self.arrays({leaf.name: leaf for leaf in copies}, target)

    def small_leaves(self, folder: Path, target: Target) -> dict[str, Leaf] | None:
        """The arrays of a small file as leaves. None for a folder without such a file.

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
        leaves: dict[str, Leaf] = {}
        for name, node in target.arrays.items():
            part = self.part_of_bytes(data[name], node)
            leaves[name] = Leaf(name, node["dtype"], tuple(node["shape"]), {"": part})
        return leaves

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


def _small_file(flat: FlatState) -> bytes | None:
    """The arrays of a copy as a file of safetensors. None if such a file cannot hold all of them.

    The writers of the library take longer than the rest of a save.
    """
    header: dict[str, Any] = {}
    arrays: list[Any] = []
    end = 0
    for dtype, code in _SAFETENSORS.items():
        for leaf in flat.leaves.values():
            part = leaf.parts[""]
            # A DTensor may be a part of its tensor.
            if leaf.dtype == dtype and part.shape[: len(leaf.shape)] == leaf.shape:
                arrays.append(raw(part))
                begin, end = end, end + part.nbytes
                place = {"dtype": code, "shape": leaf.shape, "data_offsets": [begin, end]}
                header[leaf.name] = place
    # The key of the metadata is no name of an array.
    if len(header) < len(flat.leaves) or "__metadata__" in header:
        return None
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *arrays])


def bytes_of_small_file(folder: Path) -> dict[str, np.ndarray] | None:
    """The bytes of each array in the file of a small state, uint8 (n,), by name; or None."""
    path = folder / SMALL_FILE
    if not path.exists():
        return None
    found = safetensors.deserialize(regular_file.read(path, _MAX_SMALL_FILE))
    return {name: np.frombuffer(entry["data"], np.uint8) for name, entry in found}


def copy_to_host(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Copies arrays in host memory: each second array into the first one."""
    map_in_threads(lambda pair: np.copyto(*pair), pairs, sum(old.nbytes for _, old in pairs))


def raw(part: Any) -> np.ndarray:
    """The bytes of a part in host memory.

    Returns:
        The bytes, uint8 (n,). They share the memory of the part if its elements are in order.
    """
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)


def finite(data: np.ndarray, dtype: str) -> bool:
    """Whether an array's bytes, uint8 (n,), hold no NaN or Inf; `dtype` is a name: "bfloat16".

    A number is NaN or Inf exactly if all bits of its exponent are ones. This test needs no bfloat16
    type and raises no warnings.
    """
    if dtype not in _INFINITY:
        return True
    size, infinity = _INFINITY[dtype]
    for at in range(0, len(data), _PIECE_BYTES):
        bits = data[at : at + _PIECE_BYTES].view(f"u{size}")
        if np.any(bits & infinity == infinity):
            return False
    return True


def nonfinite(flat: FlatState) -> tuple[str, ...]:
    """The names of the arrays of a copy with NaN or Inf, allowed or not. Waits for the copy."""
    flat.wait()
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
    if before and now:
        must_be_equal = before.keys() | now.keys()
    else:
        must_be_equal = set()
    if not _is_stateful(live):
        before, now = _array_types(name, saved), _array_types(name, live)
        # Dictionaries and lists of a torch program may grow and shrink.
        if "leaves" in live:
            must_be_equal = before.keys() | now.keys()
        else:
            must_be_equal = before.keys() & now
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
    """Dtype and shape of a node, and the kind of a random key; "a number" for another value.

    A number is of one type, whether it is a Python number or an array without axes: a counter is a
    number at the start of a run, and an array after the first jitted step.
    """
    if isinstance(node, dict):
        array = node.get("array")
    else:
        array = None
    if array is None or not (array["shape"] or "impl" in array):
        return "a number"
    return f"{array['dtype']}{tuple(array['shape'])} {array.get('impl', '')}".rstrip()
