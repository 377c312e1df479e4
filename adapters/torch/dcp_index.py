"""Reads the index (`.metadata`) of a directory of `torch.distributed.checkpoint` (DCP) as data.

The index is a pickle, and DCP would execute it. Here an allow-list in `find_class` replaces each
class of DCP by an empty class, so no code of the file runs and no class of torch changes.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch

from healcore import regular_file

INDEX = ".metadata"

Shape = tuple[int, ...]

_DCP = "torch.distributed.checkpoint"
_RECORDS = {
    (f"{_DCP}.filesystem", "_StorageInfo"),
    *((f"{_DCP}.metadata", name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata")),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in (
        "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
}  # fmt: skip
_VALUES: dict[tuple[str, str], Any] = {
    ("builtins", "dict"): dict,
    ("builtins", "set"): set,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): int,
}
"""Immutable types in place of the classes and functions of the values in DCP's own index."""


class Place(NamedTuple):
    """Where one part of an entry is stored, in bytes of a file."""

    file: str
    offset: int
    length: int
    plain: bool
    """Whether the bytes are stored as they are, without compression or another transformation."""


class IndexEntry(NamedTuple):
    """One tensor or value."""

    dtype: str
    """torch's name of the dtype, or an empty string for a value, which DCP pickles."""
    shape: Shape
    chunks: list[tuple[Shape, Shape]]
    """Offsets and sizes of a tensor's parts."""
    places: dict[Shape | None, Place]
    """Offsets of a tensor's part, or None for a value -> its place."""
    path: tuple[str, ...]
    """Path in the saved tree."""


class _Record:
    """An object of one of DCP's classes: its class name and its attributes."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        del args  # of a path, which is not read

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._kinds: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        kind = (module, name)
        if kind in _RECORDS:
            # New classes for each file, because a pickle can set attributes of a class.
            return self._kinds.setdefault(kind, type(name, (_Record,), {}))
        if kind in _VALUES:
            return _VALUES[kind]
        dtype = vars(torch).get(name) if module == "torch" else None
        if not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"it names {module}.{name}"[:200])
        return dtype


def read(path: Path) -> dict[str, IndexEntry]:
    """The entries of an index by name. ValueError if the content is not what DCP writes."""
    content = regular_file.read(path)
    try:
        return _entries(_Unpickler(content).load())
    except Exception as error:  # crafted bytes may raise any exception
        lines = str(error).splitlines() or [""]
        raise ValueError(f"{type(error).__name__}: {lines[0][:200]}") from None


def _entries(root: Any) -> dict[str, IndexEntry]:
    metadata = _attributes(root, "Metadata")
    places: dict[str, dict[Shape | None, Place]] = {}
    for index, info in metadata["storage_data"].items():
        found = _attributes(index, "MetadataIndex")
        offset = found.get("offset")
        at = None if offset is None else _shape(offset)
        places.setdefault(found["fqn"], {})[at] = _place(_attributes(info, "_StorageInfo"))
    planned = metadata.get("planner_data") or {}
    return {
        name: _entry(kind, places.get(name, {}), planned.get(name, name.split(".")))
        for name, kind in metadata["state_dict_metadata"].items()
    }


def _place(info: Mapping[str, Any]) -> Place:
    file, offset, length = info["relative_path"], info["offset"], info["length"]
    if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts or "\\" in file:
        raise ValueError(f"it names a file outside the directory: {file[:200]}")
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise ValueError("the offset or length of a place is not a number")
    return Place(file, offset, length, not info.get("transform_descriptors"))


def _entry(kind: Any, places: dict[Shape | None, Place], planned: Any) -> IndexEntry:
    path = tuple(part for key in planned for part in str(key).split("."))
    if type(kind).__name__ == "BytesStorageMetadata":
        return IndexEntry("", (), [], places, path)
    tensor = _attributes(kind, "TensorStorageMetadata")
    state = tensor["properties"].state
    dtype = state[0] if type(state) is tuple else state["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise ValueError("the dtype of a tensor is not a dtype of torch")
    chunks = [_attributes(each, "ChunkStorageMetadata") for each in tensor["chunks"]]
    parts = [(_shape(each["offsets"]), _shape(each["sizes"])) for each in chunks]
    name = str(dtype).removeprefix("torch.")
    return IndexEntry(name, _shape(tensor["size"]), parts, places, path)


def _shape(value: Any) -> Shape:
    possible = type(value) is tuple and all(type(size) is int and size >= 0 for size in value)
    if not possible or math.prod(value) >= 1 << 62:
        raise ValueError("a shape is not a tuple of possible sizes")
    return value


def _attributes(value: Any, name: str) -> Mapping[str, Any]:
    if type(value).__name__ != name or not isinstance(value.state, dict):
        raise ValueError(f"expected a {name}")
    return value.state
