"""Opens files of `torch.save` and safetensors, and directories of `torch.distributed.checkpoint`.

No code of a file runs: `torch.load(weights_only=True)` reads the files of torch. The index of a DCP
directory is a pickle too, in which DCP's reader would import any class; here only the classes of an
index are known. A file may still name any size, so `healcore.tools.probe` calls this module in a
process with limits.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

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
        is_archive = zipfile.is_zipfile(file)
    if start[:2] == b"PK" and not is_archive:
        raise ProbeError(f"{path} is cut off: the directory at the end of its archive is missing")
    if start[8:] != b"{":
        return _contents("torch file", _load(path, is_archive=is_archive))
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
    places: dict[str, list[filesystem._StorageInfo]] = {}
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


class _Unimported(list[Any]):
    """Takes the place of an object of the program, whose class is not imported: its contents."""

    def __new__(cls, *contents: Any) -> _Unimported:
        self = super().__new__(cls)
        self.extend(contents)
        return self

    def __init__(self, *_: Any) -> None:
        """Keeps the contents."""

    __setstate__ = list.append
    __hash__ = object.__hash__  # type: ignore[assignment]  # it may be a key


def _load(path: Path, part: bytes | None = None, *, is_archive: bool = True) -> Any:
    """Loads what `torch.save` wrote, without importing classes of the program.

    Args:
        path: the file; for errors, if `part` is given.
        part: what to load, or None for the whole file, memory-mapped.
        is_archive: False for a file of torch before 1.6.

    Raises:
        ProbeError: the file is damaged, or names a function of Python or of the system.
    """
    allowed = _numpy_globals()

    def source() -> Any:
        return path if part is None else io.BytesIO(part)

    try:
        with torch.serialization.safe_globals(allowed):
            if is_archive:
                for name in torch.serialization.get_unsafe_globals_in_checkpoint(source()):
                    if not name.startswith("builtins."):  # no class: exec, getattr
                        allowed.append((_Unimported, name))
        mmap = is_archive and part is None
        with torch.serialization.safe_globals(allowed):
            return torch.load(source(), map_location="cpu", weights_only=True, mmap=mmap)
    except (OSError, MemoryError):
        raise
    except pickle.UnpicklingError:
        raise ProbeError(
            f"{path} holds more than tensors and plain values, and loading it could execute code, "
            "or it is damaged: save only the state dictionaries, and probe that file"
        ) from None
    except Exception as error:  # damaged bytes may raise any exception
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


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values in nested containers, with their paths."""
    parts: Iterable[tuple[Any, Any]]
    if isinstance(tree, Mapping):
        parts = tree.items()
    elif isinstance(tree, list | tuple):
        parts = enumerate(tree)
    else:
        yield path, tree
        return
    for key, part in parts:
        yield from _leaves(part, (*path, _key_text(key)))


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


def _read_sharded(
    folder: Path, name: str, places: list[filesystem._StorageInfo], count: int
) -> np.ndarray:
    """The values of all `count` parts of a tensor, in one dimension."""
    if len(places) != count:
        raise ProbeError(f"{folder}: {len(places)} of {count} parts of {name} are present")
    parts: list[np.ndarray] = []
    for place in places:
        parts.append(_flat(_part(folder, place)))
    return np.concatenate(parts)


def _part(folder: Path, place: filesystem._StorageInfo) -> Any:
    """The tensor or value in one place of one file."""
    at = folder / place.relative_path
    with open(at, "rb", opener=regular_file.opener) as file:
        file.seek(place.offset)
        return _load(at, file.read(place.length))


# -- the index of a DCP directory, as data ---------------------------------------------------------

INDEX = ".metadata"

_CLASSES = (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.StorageMeta,
    metadata.TensorProperties,
    filesystem._StorageInfo,
)
_VALUES: dict[str, Any] = {
    "builtins.dict": dict,
    "builtins.set": set,
    "collections.OrderedDict": OrderedDict,
    "torch.Size": torch.Size,
}
"""Types whose attributes a pickle cannot set, as they are written in C."""


class _Unpickler(pickle.Unpickler):
    """Loads an index of DCP without a class or function that the file could misuse."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        # New classes for each file, because a pickle can set attributes of a class.
        self._known = {**_VALUES}
        for known in _CLASSES:
            name = f"{known.__module__}.{known.__name__}"
            self._known[name] = type(known.__name__, (known,), {})

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in self._known:
            return self._known[full]
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if full == "torch.serialization._get_layout":
            return lambda _: torch.strided
        if name == "_MEM_FORMAT_ENCODING":
            return lambda number: metadata._MEM_FORMAT_ENCODING(number)
        if module.startswith("pathlib"):  # the directory of the save
            return lambda *_: None
        raise pickle.UnpicklingError(f"it names {full}"[:200])


def read_index(path: Path) -> Metadata:
    """Reads the index of a DCP directory without running code of the file.

    Args:
        path: the file `.metadata` of the directory.

    Returns:
        The index, whose places are in files of the directory.

    Raises:
        ValueError: the content is not what DCP writes.
        OSError: the file cannot be read.
    """
    content = regular_file.read(path)
    places: dict[MetadataIndex, filesystem._StorageInfo] = {}
    try:
        index = _Unpickler(content).load()
        for key, place in index.storage_data.items():
            name = place.relative_path
            if not name or name != Path(name).name:
                raise ValueError(f"it names a file outside the directory: {name[:200]}")
            if place.transform_descriptors:
                raise ValueError("it is compressed or transformed, which healcore cannot read")
            # Of DCP's own class, because a key is equal to keys of its class only.
            places[MetadataIndex(key.fqn, key.offset)] = place
        return Metadata(index.state_dict_metadata, index.planner_data or {}, places)
    except Exception as error:  # crafted bytes may raise any exception
        raise ValueError(f"{type(error).__name__}: {first_line(error)}") from None
