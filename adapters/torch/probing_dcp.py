"""Opening directories of `torch.distributed.checkpoint` for `healcore probe`.

Not with DCP's own reader: its index is a pickle and so are the values beside the tensors, and both
would be executed.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from healcore.tools.probe.contents.contents import MOST_PARTS, Array, Contents, Names
from healcore.tools.probe.contents.records import Checked, check_archive
from healcore.tools.probe.contents.torch_pickle import plain_tensor
from healcore.tools.probe.verdict import ProbeError
from healcore.torch import dcp_index
from healcore.torch.dcp_index import INDEX, Entry, Place
from healcore.torch.probing import contents_of, first_line, load, pieces, refused

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
        if entry.saved.chunks:
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
        if name in index and index[name].saved.chunks
    }


class _Entry(NamedTuple):
    """One tensor or value, and its path in the tree."""

    path: tuple[str, ...]
    saved: Entry

    @property
    def places(self) -> list[Place]:
        """Where its parts lie."""
        return list(self.saved.places.values())


def _index(folder: Path) -> dict[str, _Entry]:
    """What `.metadata` lists, by name."""
    at = folder / INDEX
    try:
        entries = dcp_index.read(at)
        names = Names(at.stat().st_size)
        return {
            name: _Entry(names.take(_split(name, entry.planned)), entry)
            for name, entry in entries.items()
        }
    except OSError as error:
        raise ProbeError(f"{at} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ProbeError(f"{at} is damaged: {first_line(error)}") from None


def _saved(folder: Path, path: tuple[str, ...], name: str, entry: _Entry) -> Array:
    return Array(path, entry.saved.dtype, entry.saved.shape, _shards(folder, name, entry), name)


def _shards(folder: Path, name: str, entry: _Entry) -> Callable[[], Iterator[np.ndarray]]:
    def read() -> Iterator[np.ndarray]:
        whole = len(entry.saved.chunks)
        if len(entry.places) != whole:
            there = f"{len(entry.places)} of {whole} parts of {name} are there"
            raise ProbeError(f"{folder}: {there}")
        for place in entry.places:
            tensor, _ = _loaded(folder, place)
            if not isinstance(tensor, Tensor):
                raise ProbeError(f"{folder / place.file}: {name} is no tensor there")
            yield from pieces(tensor)

    return read


def _loaded(folder: Path, place: Place) -> tuple[Any, int]:
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
    return tuple(name.split("."))
