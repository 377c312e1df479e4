"""Opening directories of `torch.distributed.checkpoint` for `healcore probe`.

Not with DCP's own reader: its index is a pickle and so are the values beside the tensors, and both
would be executed.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from healcore.tools.probe.contents.contents import Array, Contents, flattened
from healcore.tools.probe.verdict import ProbeError
from healcore.torch.probing import contents_of, first_line, load, pieces, plain, refused


def open_dcp(folder: Path) -> Contents:
    """A directory of `torch.distributed.checkpoint`: one shard is in memory at a time.

    Raises:
        ProbeError: it is damaged, or of a kind that cannot be read without executing it.
    """
    arrays, values, notes = [], {}, []
    for name, entry in _index(folder).items():
        if entry.chunks:
            arrays.append(_saved(folder, entry.path, name, entry))
            continue
        for place in entry.places[:1]:
            try:
                part = contents_of("", flattened(plain(_loaded(folder, place)), entry.path))
            except ProbeError as error:
                notes.append(f"{name} was not looked at: {error}")
                continue
            except RecursionError:
                notes.append(f"{name} was not looked at: it holds itself, or is nested too deeply")
                continue
            arrays += part.arrays
            values |= part.values
    return Contents("DCP directory", arrays, values, tuple(notes))


def stored_arrays(data: Path, names: Iterable[str]) -> dict[str, Array]:
    """Arrays of a checkpoint of `DCPStore`; those that are not there are left out.

    Args:
        data: its directory `data`.
        names: as its `state.json` has them.

    Raises:
        ProbeError: it is damaged.
    """
    index = _index(data)
    return {
        name: _saved(data, (name,), name, index[name])
        for name in names
        if name in index and index[name].chunks
    }


class _MetadataUnpickler(pickle.Unpickler):
    """`.metadata` is a pickle. Only the classes that DCP itself puts there are made from it."""

    _KNOWN: Mapping[str, set[str]] = {
        "torch.distributed.checkpoint.metadata": {
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
            "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"},
        "torch": {"Size"},
        "collections": {"OrderedDict"},
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("pathlib") and name.endswith("Path"):
            return _no_path
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in self._KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _no_path(*parts: str) -> str:
    """A path in it is not needed, and one of another system could not be made here."""
    return "/".join(parts)


class _Place(NamedTuple):
    """Where a part of an entry lies."""

    file: str
    offset: int
    length: int
    plain: bool
    """Not compressed."""


class _Entry(NamedTuple):
    """One tensor or value."""

    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    chunks: int
    """Of how many parts a tensor is; 0 of what is none."""
    places: list[_Place]


def _index(folder: Path) -> dict[str, _Entry]:
    """What `.metadata` lists, by name."""
    at = folder / ".metadata"
    try:
        with at.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        places: dict[str, list[_Place]] = {}
        for index, place in metadata.storage_data.items():
            plain = not getattr(place, "transform_descriptors", None)
            found = _Place(str(place.relative_path), int(place.offset), int(place.length), plain)
            places.setdefault(str(index.fqn), []).append(found)
        paths = metadata.planner_data or {}
        return {
            str(name): _entry(kind, _split(name, paths.get(name)), places.get(name, []))
            for name, kind in metadata.state_dict_metadata.items()
        }
    except OSError as error:
        raise ProbeError(f"{at} cannot be read: {error.strerror}") from None
    except Exception as error:  # a damaged pickle raises anything, or makes anything
        raise ProbeError(f"{at} is damaged: {first_line(error)}") from None


def _entry(kind: Any, path: tuple[str, ...], places: list[_Place]) -> _Entry:
    if not hasattr(kind, "chunks"):
        return _Entry(path, "", (), 0, places)
    dtype = str(kind.properties.dtype).removeprefix("torch.")
    return _Entry(path, dtype, tuple(map(int, kind.size)), len(kind.chunks), places)


def _saved(folder: Path, path: tuple[str, ...], name: str, entry: _Entry) -> Array:
    return Array(path, entry.dtype, entry.shape, _shards(folder, name, entry), name)


def _shards(folder: Path, name: str, entry: _Entry) -> Callable[[], Iterator[np.ndarray]]:
    def read() -> Iterator[np.ndarray]:
        if len(entry.places) != entry.chunks:
            there = f"{len(entry.places)} of {entry.chunks} parts of {name} are there"
            raise ProbeError(f"{folder}: {there}")
        for place in entry.places:
            tensor = _loaded(folder, place)
            if not isinstance(tensor, Tensor):
                raise ProbeError(f"{folder / place.file}: {name} is no tensor there")
            yield from pieces(tensor)

    return read


def _loaded(folder: Path, place: _Place) -> Any:
    """What lies in one place of one file."""
    at = folder / place.file
    if not place.plain:
        raise ProbeError(f"{at} is compressed or transformed, which healcore does not undo")
    try:
        with at.open("rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
        return load(io.BytesIO(data))
    except OSError as error:
        raise ProbeError(f"{at} cannot be read: {error.strerror or error}") from None
    except pickle.UnpicklingError as error:
        raise ProbeError(refused(at, error)) from None
    except Exception as error:  # damaged bytes raise anything
        raise ProbeError(f"{at} is damaged: {first_line(error)}") from None


def _split(name: str, planned: Any) -> tuple[str, ...]:
    """Where an entry lies in the tree; planners note it, some do not."""
    if isinstance(planned, (tuple, list)) and planned:
        return tuple(part for each in planned for part in str(each).split("."))
    return tuple(name.split("."))
