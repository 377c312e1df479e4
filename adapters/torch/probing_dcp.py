"""Opening directories of `torch.distributed.checkpoint` for `healcore probe`.

Not with DCP's own reader: its index is a pickle and so are the values beside the tensors, and both
would be executed.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from healcore.runtime import inert_pickle
from healcore.runtime.inert_pickle import Global, Made
from healcore.tools.probe.contents.contents import MOST_PARTS, Array, Contents, Names, shape_of
from healcore.tools.probe.contents.records import Checked, check_archive
from healcore.tools.probe.contents.torch_pickle import plain_tensor
from healcore.tools.probe.verdict import ProbeError
from healcore.torch.probing import contents_of, first_line, load, pieces, refused

_METADATA = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_DTYPES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}  # fmt: skip


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
                value, size = _loaded(folder, place)
                part = contents_of("", value, Names(size), entry.path)
            except ProbeError as error:
                notes.append(f"{name} was not looked at: {error}")
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
    """What `.metadata` lists, by name.

    It is a pickle, and is read as data: see `inert_pickle`. Takes memory in proportion to its size.
    """
    at = folder / ".metadata"
    try:
        content = at.read_bytes()
        listed = _listed(content)
        _check_room(listed)
        return listed
    except OSError as error:
        raise ProbeError(f"{at} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # ProbeError is a ValueError
        raise ProbeError(f"{at} is damaged: {first_line(error)}") from None


def _listed(content: bytes) -> dict[str, _Entry]:
    metadata = _attributes(inert_pickle.read(content)[0], "Metadata")
    places: dict[str, list[_Place]] = {}
    for index, info in _dictionary(metadata["storage_data"]).items():
        name = _attributes(index, "MetadataIndex")["fqn"]
        places.setdefault(name, []).append(_place(info))
    paths = _dictionary(metadata.get("planner_data") or {})
    names = Names(len(content))
    return {
        _text(name): _entry(kind, names.take(_split(name, paths.get(name))), places.get(name, []))
        for name, kind in _dictionary(metadata["state_dict_metadata"]).items()
    }


def _place(info: Any) -> _Place:
    state = inert_pickle.state(
        info, Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    )
    if state is None:
        raise ValueError("a place in it is none")
    file, offset, length = _text(state["relative_path"]), state["offset"], state["length"]
    if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts or "\\" in file:
        raise ValueError(f"it names a file outside the directory: {file[:200]}")
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise ValueError("a place in it has no number as its offset or length")
    return _Place(file, offset, length, not state.get("transform_descriptors"))


def _check_room(listed: Mapping[str, _Entry]) -> None:
    """The places of a file lie beside each other: so no byte of it is read many times."""
    places = sorted(place[:3] for entry in listed.values() for place in entry.places)
    for (file, offset, length), (following, begin, _) in itertools.pairwise(places):
        if file == following and offset + length > begin:
            raise ValueError(f"two parts of it overlap in {file[:200]}")


def _entry(kind: Any, path: tuple[str, ...], places: list[_Place]) -> _Entry:
    if _is(kind, "BytesStorageMetadata"):
        return _Entry(path, "", (), 0, places)
    tensor = _attributes(kind, "TensorStorageMetadata")
    properties, chunks, size = tensor["properties"], tensor["chunks"], tensor["size"]
    if not _is(properties, "TensorProperties") or type(chunks) is not list:
        raise ValueError("an entry of it is none of a tensor")
    dtype = properties.state[0] if type(properties.state) is tuple else properties.state["dtype"]
    if type(dtype) is not Global or dtype.module != "torch":
        raise ValueError("the dtype of a tensor in it is none")
    if type(size) is not Made or size.what != Global("torch", "Size") or len(size.args) != 1:
        raise ValueError("the shape of a tensor in it is none")
    return _Entry(path, dtype.name[:40], shape_of(size.args[0]), len(chunks), places)


def _is(value: Any, name: str) -> bool:
    return type(value) is Made and value.what == Global(_METADATA, name)


def _attributes(value: Any, name: str) -> Mapping[Any, Any]:
    """The attributes of an object of DCP's index."""
    state = inert_pickle.state(value, Global(_METADATA, name))
    if state is None:
        raise ValueError(f"it has something else where a {name} should be")
    return state


def _dictionary(value: Any) -> Mapping[Any, Any]:
    found = inert_pickle.as_dict(value)
    if found is None:
        raise ValueError("it has something else where a dictionary should be")
    return found


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("it has something else where a name should be")
    return value


def _saved(folder: Path, path: tuple[str, ...], name: str, entry: _Entry) -> Array:
    return Array(path, entry.dtype, entry.shape, _shards(folder, name, entry), name)


def _shards(folder: Path, name: str, entry: _Entry) -> Callable[[], Iterator[np.ndarray]]:
    def read() -> Iterator[np.ndarray]:
        if len(entry.places) != entry.chunks:
            there = f"{len(entry.places)} of {entry.chunks} parts of {name} are there"
            raise ProbeError(f"{folder}: {there}")
        for place in entry.places:
            tensor, _ = _loaded(folder, place)
            if not isinstance(tensor, Tensor):
                raise ProbeError(f"{folder / place.file}: {name} is no tensor there")
            yield from pieces(tensor)

    return read


def _loaded(folder: Path, place: _Place) -> tuple[Any, int]:
    """What lies in one place of one file, and the size of its pickle."""
    at = folder / place.file
    if not place.plain:
        raise ProbeError(f"{at} is compressed or transformed, which healcore does not undo")
    try:
        if not at.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        with at.open("rb") as file:
            if place.offset + place.length > os.fstat(file.fileno()).st_size:
                raise ProbeError(f"{at} is damaged: it ends before what should lie in it")
            file.seek(place.offset)
            data = file.read(place.length)
        file = io.BytesIO(data)
        with zipfile.ZipFile(file) as archive:
            checked = check_archive(archive, str(at), len(data))
            tensor = _tensor(checked)
        file.seek(0)
        return (load(file) if tensor is None else tensor), checked.pickled
    except ProbeError:
        raise
    except OSError as error:
        raise ProbeError(f"{at} cannot be read: {error.strerror or error}") from None
    except pickle.UnpicklingError as error:
        raise ProbeError(refused(at, error)) from None
    except Exception as error:  # damaged bytes raise anything
        raise ProbeError(f"{at} is damaged: {first_line(error)}") from None


def _tensor(checked: Checked) -> Tensor | None:
    """The tensor in a part, which most parts are: made here in a third of the time of torch.load.

    None: it is something else.
    """
    plain = plain_tensor(checked.value)
    dtype = None if plain is None else _DTYPES.get(plain[0].kind)
    if plain is None or dtype is None:
        return None
    storage, offset, shape, strides = plain
    content = checked.content(storage) if storage.bytes else None
    if not content:
        return None
    return torch.frombuffer(bytearray(content), dtype=dtype).as_strided(shape, strides, offset)


def _split(name: str, planned: Any) -> tuple[str, ...]:
    """Where an entry lies in the tree; planners note it, some do not."""
    if (
        isinstance(planned, (tuple, list))
        and 0 < len(planned) <= MOST_PARTS
        and all(
            type(each) is str or (type(each) is int and 0 <= each < 1 << 62) for each in planned
        )
    ):
        return tuple(part for each in planned for part in str(each).split("."))
    return tuple(_text(name).split("."))
