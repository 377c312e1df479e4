"""Opens files of `torch.save` and safetensors, and directories of `torch.distributed.checkpoint`.

`torch.load(weights_only=True)` runs no code of a file. But it allocates any size that a file names,
so `healcore.tools.probe` calls this module in a process with limits. DCP's own reader is not used,
because it unpickles its index (`.metadata`) and all values that are not tensors. Here an allow-list
replaces each class of the index by an empty class. So no code of the file runs, and the file
changes no class of torch.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from healcore import regular_file
from healcore.checkpoint_contents import Array, Contents, Damaged, ProbeError, first_line


def open_file(path: Path) -> Contents:
    """Opens a file of `torch.save` or safetensors.

    A file of `torch.save` is memory-mapped, or read as a whole before torch 1.6 (no zip).

    Args:
        path: the file. Its first bytes say which of the two formats it has.

    Returns:
        The arrays and plain values of the file, by path. An array is read when it is used.

    Raises:
        Damaged: the header of a safetensors file is invalid, or does not match the arrays.
        ProbeError: the file is damaged, or has objects that are not plain values.
    """
    with open(path, "rb", opener=regular_file.opener) as file:
        start = file.read(9)
        mapped = zipfile.is_zipfile(file)
    if start[:2] == b"PK" and not mapped:
        raise ProbeError(f"{path} is cut off: the directory at the end of its archive is missing")
    if start[8:] != b"{":
        return _contents("torch file", _load(path, path, mmap=mapped))
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise Damaged(f"{path}: safetensors rejects its header: {first_line(error)}") from None
    return _contents("safetensors", tensors)


def open_directory(folder: Path) -> Contents:
    """Opens a directory of `torch.distributed.checkpoint`, with the parts of all ranks.

    A value that is not a tensor, and cannot be read, is named in the notes of the result.

    Args:
        folder: the directory with the file `.metadata`.

    Returns:
        The arrays and plain values of the directory, by path. An array is read when it is used.

    Raises:
        ProbeError: the index cannot be read.
    """
    try:
        index = read_index(folder / INDEX)
    except ValueError as error:
        raise ProbeError(f"{folder / INDEX} cannot be read: {first_line(error)}") from None
    places: dict[str, list[_StorageInfo]] = {}
    for key, place in index.storage_data.items():
        places.setdefault(key.fqn, []).append(place)
    leaves: dict[tuple[str, ...], Any] = {}
    notes: list[str] = []
    for name, entry in index.state_dict_metadata.items():
        path = _split(index.planner_data.get(name, (name,)))
        if isinstance(entry, TensorStorageMetadata):
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            read = partial(_read_sharded, folder, name, places.get(name, []), len(entry.chunks))
            leaves[path] = Array(dtype, tuple(entry.size), read, name)
        elif name in places:
            try:
                leaves |= _contents("", _part(folder, places[name][0]), path).leaves
            except ProbeError as error:
                notes.append(f"{name} was not looked at: {error}")
    return Contents("DCP directory", leaves, tuple(notes))


def _split(keys: Iterable[Any]) -> tuple[str, ...]:
    """Splits the dotted keys of a path: "layers.0.weight"."""
    parts: list[str] = []
    for key in keys:
        parts += _key_text(key).split(".")
    return tuple(parts)


class _UnimportedObject(list[Any]):
    """Replaces an object whose class is not imported, and keeps its contents as a list."""

    def __new__(cls, *contents: Any) -> _UnimportedObject:
        self = super().__new__(cls)
        self.extend(contents)
        return self

    def __init__(self, *_: Any) -> None:
        """Keeps the contents."""

    __setstate__ = list.append
    __hash__ = object.__hash__  # type: ignore[assignment]  # it may be a key


def _load(source: Any, path: Path, *, mmap: bool = False, unimported: tuple[str, ...] = ()) -> Any:
    """Loads what `torch.save` wrote, without importing the classes in `unimported`.

    Each object of such a class becomes an `_UnimportedObject`. torch names one class that it does
    not allow, so the file is loaded again with this class in `unimported`, until no class is
    missing.

    Raises ProbeError for functions of Python and of the system, and for damage.
    """
    allowed: list[Any] = _numpy_globals()
    for name in unimported:
        allowed.append((_UnimportedObject, name))
    try:
        with torch.serialization.safe_globals(allowed):
            file = source
            if isinstance(source, bytes):
                file = io.BytesIO(source)
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # damaged bytes may raise any exception
        refused = re.search(r"GLOBAL ([\w.]+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and refused:
            # torch refuses modules of the system, and names builtins without their module.
            if "not an allowed global" in str(error) and refused[1] not in unimported:
                return _load(source, path, mmap=mmap, unimported=(*unimported, refused[1]))
            raise ProbeError(
                f"{path} holds more than tensors and plain values (a {refused[1]}), and loading it "
                "could execute code: save only the state dictionaries, and probe that file"
            ) from None
        # torch explains `weights_only` at length before it reports the error.
        explained = re.search(r"WeightsUnpickler error:\s*(\S.{,199})", str(error))
        if explained:
            reason = explained[1]
        else:
            reason = first_line(error)
        raise ProbeError(f"{path} is not a torch checkpoint, or is damaged: {reason}") from None


def _numpy_globals() -> list[Any]:
    """The safe functions and classes that a pickle of NumPy's scalars and arrays may name."""
    scalar_function = np.float64(0).__reduce__()[0]
    array_function = np.zeros(0).__reduce__()[0]
    dtypes = {type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdgFD"}
    return [scalar_function, array_function, np.ndarray, np.dtype, *dtypes]


def _contents(format_name: str, tree: Any, at: tuple[str, ...] = ()) -> Contents:
    """The tensors and plain values of a tree. Other objects have no leaf; some have a note."""
    leaves: dict[tuple[str, ...], Any] = {}
    notes: list[str] = []
    # Writers of safetensors sort by size and name, so the order of the model is lost.
    in_order = format_name != "safetensors"
    for keys, leaf in _leaves(tree, at):
        path = _split(keys) or ("tensor",)  # the whole file is one tensor
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fc":
            leaf = torch.from_numpy(leaf)
        if isinstance(leaf, Tensor):
            if hasattr(leaf, "to_local"):  # a DTensor
                leaf = leaf.to_local()  # type: ignore[attr-defined]
            if leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_nested:
                notes.append(f"{'.'.join(path)} was not looked at: a tensor of {leaf.layout}")
                continue
            dtype = str(leaf.dtype).removeprefix("torch.")
            shape = tuple(leaf.shape)
            # Tensors with the same part of a storage are one tensor. Empty tensors share nothing.
            storage = None
            if leaf.numel():
                storage = (leaf.data_ptr(), shape, leaf.stride(), dtype)
            leaves[path] = Array(dtype, shape, partial(_flat, leaf), storage, in_order)
        elif isinstance(leaf, (bool, int, float, str, type(None))):
            leaves[path] = leaf
    return Contents(format_name, leaves, tuple(notes))


_MAX_REPEATS = 10
"""Maximum number of expanded entries for each stored entry, above `_FREE_ENTRIES`."""
_FREE_ENTRIES = 10_000
"""Expanded entries that any file may have."""


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values in nested containers, with their paths.

    A pickle stores a container once, however often it occurs: 60 lists, each of which holds the
    list before it twice, are 600 bytes and 2^60 values. A container that several optimizer groups
    share, such as `betas`, is expanded in each place, up to a limit.
    """
    limit = _MAX_REPEATS * _stored_entries(tree) + _FREE_ENTRIES
    visited = 0
    rest = [(path, tree)]
    while rest:
        at, node = rest.pop()
        visited += 1
        if visited > limit:
            raise ProbeError(
                "the file holds the same containers again and again: expanded they have more than "
                f"{limit:,} entries, and a checkpoint has none of that kind"
            )
        parts: Iterable[tuple[Any, Any]]
        if isinstance(node, Mapping):
            parts = node.items()
        elif isinstance(node, list | tuple):
            parts = enumerate(node)
        else:
            yield at, node
            continue
        # The last entry of `rest` comes next, so the first part is put there.
        rest += reversed([((*at, _key_text(key)), part) for key, part in parts])


def _stored_entries(tree: Any) -> int:
    """The number of entries of all containers, each container counted once."""
    seen: dict[int, int] = {}
    rest = [tree]
    while rest:
        node = rest.pop()
        if isinstance(node, Mapping | list | tuple) and id(node) not in seen:
            seen[id(node)] = len(node)
            if isinstance(node, Mapping):
                rest += node.values()
            else:
                rest += node
    return sum(seen.values())


def _key_text(key: Any) -> str:
    """A key as text. A key that is a container may be huge as text."""
    if isinstance(key, str | int | float | None):
        return str(key)
    return f"<{type(key).__name__}>"


def _flat(tensor: Tensor) -> np.ndarray:
    """The values of a tensor in one dimension, in a dtype that NumPy has."""
    flat = tensor.detach().reshape(-1)
    if flat.is_floating_point() and flat.dtype not in (torch.float32, torch.float64):
        flat = flat.float()
    return flat.resolve_conj().resolve_neg().numpy()


def _read_sharded(folder: Path, name: str, places: list[_StorageInfo], count: int) -> np.ndarray:
    """The values of all `count` parts of a tensor, in one dimension."""
    if len(places) != count:
        raise ProbeError(f"{folder}: {len(places)} of {count} parts of {name} are present")
    parts: list[np.ndarray] = []
    for place in places:
        parts.append(_flat(_part(folder, place)))
    return np.concatenate(parts)


def _part(folder: Path, place: _StorageInfo) -> Any:
    """The tensor or value in one place of one file."""
    at = folder / place.relative_path
    with open(at, "rb", opener=regular_file.opener) as file:
        file.seek(place.offset)
        return _load(file.read(place.length), at)


# -- the index of a DCP directory, as data ---------------------------------------------------------

INDEX = ".metadata"

_DCP = "torch.distributed.checkpoint"
_RECORD_MODULES = (f"{_DCP}.filesystem", f"{_DCP}.metadata", "pathlib", "pathlib._local")
_RECORDS = (
    "_StorageInfo",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "PosixPath",
    "WindowsPath",
    "PurePosixPath",
    "PureWindowsPath",
)
"""Names of the classes in an index, each of which a `_Record` replaces."""
_VALUES: dict[tuple[str, str], Any] = {
    ("builtins", "dict"): dict,
    ("builtins", "set"): set,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): int,
}
"""Types whose attributes a pickle cannot set, as they are written in C. They take the place of the
classes and functions of the values in DCP's own index."""


class _Record:
    """The attributes of an object of one of DCP's classes."""

    def __init__(self, *args: Any) -> None:
        del args  # the parts of a path, which are not read

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict):
            # Only TensorProperties has a tuple: the dtype comes first.
            state = {"dtype": state[0]}
        vars(self).update(state)


class _Unpickler(pickle.Unpickler):
    """Loads an index of DCP without a class or function that the file could misuse."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        # New classes for each file, because a pickle can set attributes of a class.
        self._records = {name: type(name, (_Record,), {}) for name in _RECORDS}

    def find_class(self, module: str, name: str) -> Any:
        if module in _RECORD_MODULES and name in self._records:
            return self._records[name]
        if (module, name) in _VALUES:
            return _VALUES[module, name]
        if module == "torch":
            dtype = vars(torch).get(name)
            if isinstance(dtype, torch.dtype):
                return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}"[:200])


def read_index(path: Path) -> Metadata:
    """Reads the index of a DCP directory without running code of the file.

    Args:
        path: the file `.metadata` of the directory.

    Returns:
        The index in DCP's own classes, with checked shapes, offsets and file names.

    Raises:
        ValueError: the content is not what DCP writes.
        OSError: the file cannot be read.
    """
    content = regular_file.read(path)
    kinds: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    try:
        index = _Unpickler(content).load()
        for name, kind in index.state_dict_metadata.items():
            kinds[name] = _kind(kind)
        for key, info in index.storage_data.items():
            places[_key(key)] = _place(info)
    except Exception as error:  # crafted bytes may raise any exception
        raise ValueError(f"{type(error).__name__}: {first_line(error)}") from None
    return Metadata(kinds, index.planner_data or {}, places, StorageMeta())


def _kind(kind: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(kind).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    if not isinstance(kind.properties.dtype, torch.dtype):
        raise ValueError("the dtype of a tensor is not a dtype of torch")
    chunks: list[ChunkStorageMetadata] = []
    for chunk in kind.chunks:
        chunks.append(ChunkStorageMetadata(_size(chunk.offsets), _size(chunk.sizes)))
    return TensorStorageMetadata(TensorProperties(kind.properties.dtype), _size(kind.size), chunks)


def _key(key: Any) -> MetadataIndex:
    offset = getattr(key, "offset", None)
    if offset is not None:
        offset = _size(offset)
    return MetadataIndex(key.fqn, offset)


def _place(info: Any) -> _StorageInfo:
    file = PurePosixPath(info.relative_path)
    offset = info.offset
    length = info.length
    if file.is_absolute() or ".." in file.parts or "\\" in str(file) or not file.parts:
        raise ValueError(f"it names a file outside the directory: {str(file)[:200]}")
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise ValueError("the offset or length of a place is not a number")
    if getattr(info, "transform_descriptors", None):
        raise ValueError("it is compressed or transformed, which healcore cannot read")
    return _StorageInfo(str(file), offset, length)


def _size(value: Any) -> torch.Size:
    if type(value) is not tuple or any(type(size) is not int or size < 0 for size in value):
        raise ValueError("a shape is not a tuple of sizes")
    return torch.Size(value)
