"""Reads the index (`.metadata`) of a directory of `torch.distributed.checkpoint` (DCP) as data.

The index is a pickle, and DCP would execute it. Here an allow-list replaces each class by an empty
class. So no code of the file runs, and the file changes no class of torch.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from typing import Any

import torch
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
from healcore.checkpoint_contents import first_line

INDEX = ".metadata"

_DCP = "torch.distributed.checkpoint"
_RECORD_MODULES = (f"{_DCP}.filesystem", f"{_DCP}.metadata", "pathlib", "pathlib._local")
_RECORDS = (
    "_StorageInfo", "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
    "StorageMeta", "TensorProperties", "TensorStorageMetadata", "PosixPath", "WindowsPath",
    "PurePosixPath", "PureWindowsPath",
)  # fmt: skip
_VALUES: dict[tuple[str, str], Any] = {
    ("builtins", "dict"): dict,
    ("builtins", "set"): set,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): int,
}
"""Immutable types in place of the classes and functions of the values in DCP's own index."""


class _Record:
    """The attributes of an object of one of DCP's classes."""

    def __init__(self, *args: Any) -> None:
        del args  # of a path, which is not read

    def __setstate__(self, state: Any) -> None:
        # Only TensorProperties has a tuple: the dtype comes first.
        vars(self).update(state if isinstance(state, dict) else {"dtype": state[0]})


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        # New classes for each file, because a pickle can set attributes of a class.
        self._records = {name: type(name, (_Record,), {}) for name in _RECORDS}

    def find_class(self, module: str, name: str) -> Any:
        if module in _RECORD_MODULES and name in self._records:
            return self._records[name]
        if (module, name) in _VALUES:
            return _VALUES[module, name]
        dtype = vars(torch).get(name) if module == "torch" else None
        if not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"it names {module}.{name}"[:200])
        return dtype


def read(path: Path) -> Metadata:
    """The index, in DCP's own classes. ValueError if the content is not what DCP writes."""
    content = regular_file.read(path)
    try:
        index = _Unpickler(content).load()
        kinds = {name: _kind(kind) for name, kind in index.state_dict_metadata.items()}
        places = {_key(key): _place(info) for key, info in index.storage_data.items()}
    except Exception as error:  # crafted bytes may raise any exception
        raise ValueError(f"{type(error).__name__}: {first_line(error)}") from None
    return Metadata(kinds, index.planner_data or {}, places, StorageMeta())


def _kind(kind: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(kind).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    if not isinstance(kind.properties.dtype, torch.dtype):
        raise ValueError("the dtype of a tensor is not a dtype of torch")
    chunks = [ChunkStorageMetadata(_size(c.offsets), _size(c.sizes)) for c in kind.chunks]
    return TensorStorageMetadata(TensorProperties(kind.properties.dtype), _size(kind.size), chunks)


def _key(key: Any) -> MetadataIndex:
    offset = getattr(key, "offset", None)
    return MetadataIndex(key.fqn, None if offset is None else _size(offset))


def _place(info: Any) -> _StorageInfo:
    file, offset, length = PurePosixPath(info.relative_path), info.offset, info.length
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
