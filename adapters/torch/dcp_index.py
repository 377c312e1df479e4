"""Reads the index (`.metadata`) of a directory of `torch.distributed.checkpoint` as data.

The index is a pickle, and DCP would execute it. `inert_pickle` imports and calls nothing. Memory
and time are proportional to the file's size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch

from healcore import regular_file
from healcore.torch import inert_pickle
from healcore.torch.inert_pickle import Global, name_of

INDEX = ".metadata"

Shape = tuple[int, ...]

_METADATA = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_DCP = {
    _STORAGE_INFO,
    Global("builtins", "dict"),
    Global("builtins", "set"),
    Global("torch", "Size"),
    Global("torch.serialization", "_get_layout"),
    Global("collections", "OrderedDict"),
    *(Global(_METADATA, name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
    *(Global(module, name) for module in ("pathlib", "pathlib._local") for name in (
        "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
}  # fmt: skip
"""The classes of DCP's own index."""


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
    planned: Any
    """The planner's path in the tree, which is not checked."""


def read(path: Path, *, only_dcp: bool = False) -> dict[str, IndexEntry]:
    """The entries of an index by name. ValueError if the content is not what DCP writes.

    Savers of other projects may add objects of their own. With `only_dcp` such objects are an error
    too, even in parts that this function does not read.
    """
    content = regular_file.read(path)
    try:
        return _entries(
            inert_pickle.read(content, allowed=_is_dcps if only_dcp else lambda _: True)
        )
    except Exception as error:  # crafted bytes may raise any exception
        lines = str(error).splitlines() or [""]
        raise ValueError(f"{type(error).__name__}: {lines[0][:200]}") from None


def _is_dcps(kind: Global) -> bool:
    """Whether DCP's own index names this class, function or dtype."""
    return kind in _DCP or (
        kind.module == "torch" and isinstance(vars(torch).get(kind.name), torch.dtype)
    )


def _entries(root: Any) -> dict[str, IndexEntry]:
    metadata = _attributes(root, "Metadata")
    places: dict[str, dict[Shape | None, Place]] = {}
    parts = []
    for index, info in _dictionary(metadata["storage_data"]).items():
        found = _attributes(index, "MetadataIndex")
        offset = found.get("offset")
        place = _place(info)
        parts.append(place[:3])
        at = None if offset is None else _shape(offset)
        places.setdefault(_text(found["fqn"]), {})[at] = place
    _check_overlaps(parts)
    planned = _dictionary(metadata.get("planner_data") or {})
    kinds = _dictionary(metadata["state_dict_metadata"])
    return {
        _text(name): _entry(kind, places.get(name, {}), planned.get(name))
        for name, kind in kinds.items()
    }


def _place(info: Any) -> Place:
    state = _attributes(info, _STORAGE_INFO.name, _STORAGE_INFO.module)
    file, offset, length = _text(state["relative_path"]), state["offset"], state["length"]
    if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts or "\\" in file:
        raise ValueError(f"it names a file outside the directory: {file[:200]}")
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise ValueError("the offset or length of a place is not a number")
    return Place(file, offset, length, not state.get("transform_descriptors"))


def _check_overlaps(parts: list[tuple[str, int, int]]) -> None:
    """Raises ValueError if places overlap, because bytes could then be read many times."""
    for (file, offset, length), (following, begin, _) in itertools.pairwise(sorted(parts)):
        if file == following and offset + length > begin:
            raise ValueError(f"two parts overlap in {file[:200]}")


def _entry(kind: Any, places: dict[Shape | None, Place], planned: Any) -> IndexEntry:
    if _is_a(kind, _METADATA, "BytesStorageMetadata"):
        return IndexEntry("", (), [], places, planned)
    tensor = _attributes(kind, "TensorStorageMetadata")
    if not _is_a(tensor["properties"], _METADATA, "TensorProperties"):
        raise ValueError("a tensor has no properties")
    state = tensor["properties"].state
    dtype = state[0] if type(state) is tuple else _dictionary(state)["dtype"]
    named = name_of(dtype)
    if named is None or named.module != "torch":
        raise ValueError("the dtype of a tensor is not a dtype of torch")
    if type(tensor["chunks"]) is not list:
        raise ValueError("the parts of a tensor are not a list")
    chunks = [_attributes(each, "ChunkStorageMetadata") for each in tensor["chunks"]]
    parts = [(_shape(each["offsets"]), _shape(each["sizes"])) for each in chunks]
    return IndexEntry(named.name[:40], _shape(tensor["size"]), parts, places, planned)


def _shape(value: Any) -> Shape:
    if not _is_a(value, "torch", "Size") or len(value.args) != 1:
        raise ValueError("a shape is not a torch.Size")
    (shape,) = value.args
    if not isinstance(shape, (tuple, list)) or len(shape) > 64:
        raise ValueError("a shape is not a list of sizes")
    possible = all(type(size) is int and 0 <= size < 1 << 62 for size in shape)
    if not possible or math.prod(shape) >= 1 << 62:
        raise ValueError("a shape has impossible sizes")
    return tuple(shape)


def _is_a(value: Any, module: str, name: str) -> bool:
    return name_of(type(value)) == Global(module, name)


def _attributes(value: Any, name: str, module: str = _METADATA) -> Mapping[Any, Any]:
    state = inert_pickle.as_dict(value.state) if _is_a(value, module, name) else None
    if state is None:
        raise ValueError(f"expected a {name}")
    return state


def _dictionary(value: Any) -> Mapping[Any, Any]:
    found = inert_pickle.as_dict(value)
    if found is None:
        raise ValueError("expected a dictionary")
    return found


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("expected a name")
    return value
