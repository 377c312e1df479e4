"""Opens torch checkpoints: files of `torch.save`, directories of `torch.distributed.checkpoint`.

`torch.load(weights_only=True)` runs no code of a file. But it allocates any size that a file names,
so `healcore.tools.probe` calls this module in a process with resource limits. Rejected: DCP's own
reader, which unpickles its index and all values that are not tensors. Limits do not stop code.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from healcore import regular_file
from healcore.plugins.checkpoint_contents import (
    MOST_PARTS,
    PIECE,
    Array,
    Contents,
    Damaged,
    PathBudget,
    ProbeError,
    dotted,
    first_line,
)
from healcore.torch import dcp_index, inert_pickle
from healcore.torch.dcp_index import INDEX, IndexEntry, Place

_SCALARS = (bool, int, float, str, type(None))


def open_file(path: Path) -> Contents:
    """Opens a file of `torch.save`, memory-mapped, or read as a whole before torch 1.6 (no zip).

    Raises:
        Damaged: a record is shorter than its tensor.
        ProbeError: not a file of `torch.save`, damaged, or with objects that are not plain values.
    """
    try:
        with open(path, "rb", opener=regular_file.opener) as file:
            mapped = zipfile.is_zipfile(file)
            if mapped:
                _check_records(file, str(path))
        loaded = _load(path, mmap=mapped)
    except Exception as error:
        what = "is not a torch checkpoint, or is damaged" + " or cut short" * (not mapped)
        raise _probe_error(path, error, f"{path} {what}") from None
    try:
        return _contents("torch file", loaded, PathBudget(path.stat().st_size))
    except ProbeError as error:
        raise ProbeError(f"{path}: {error}") from None


def open_directory(folder: Path) -> Contents:
    """Opens a directory of `torch.distributed.checkpoint`. One shard is in memory at a time.

    Raises:
        ProbeError: the index cannot be read.
    """
    arrays, values, notes = [], {}, []
    for name, (path, entry) in _index(folder).items():
        if entry.chunks:
            arrays.append(_sharded(folder, path, name, entry))
            continue
        for place in [*entry.places.values()][:1]:
            try:
                part = _contents("", _part(folder, place), PathBudget(place.length), path)
            except ProbeError as error:
                notes.append(f"{name} was not looked at: {error}")
                continue
            arrays += part.arrays
            values |= part.values
    return Contents("DCP directory", arrays, values, tuple(notes))


def stored_arrays(data: Path, names: Iterable[str]) -> dict[str, Array]:
    """The named arrays of a `DCPStore` checkpoint, if present. ProbeError if it is damaged.

    `data` is the checkpoint's directory `data`, and `names` are names in its `state.json`.
    """
    index = _index(data)
    return {
        name: _sharded(data, (name,), name, index[name][1])
        for name in names
        if name in index and index[name][1].chunks
    }


def _load(source: Any, *, mmap: bool = False) -> Any:
    """Loads tensors, plain values and NumPy scalars (a best metric) of `torch.save`.

    Raises `UnpicklingError` for other objects.
    """
    constructor: Any = np.float64(0).__reduce__()[0]
    kinds = {type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdgFD"}
    with torch.serialization.safe_globals([constructor, np.dtype, *kinds]):
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)


def _check_records(file: Any, name: str) -> None:
    """Checks that each record has all bytes of its tensor. torch does not check a mapped file.

    Raises:
        Damaged: a record is too short, or two records have one name.
        ProbeError: the archive is not of torch.save.
        Exception: any type, if the archive or pickle is damaged.
    """
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise ProbeError(f"{name} has compressed records, which torch.save does not write")
        # torch's reader ignores case.
        if len({record.filename.lower() for record in records}) != len(records):
            raise Damaged(f"{name} has two records of one name")
        root = records[0].filename.partition("/")[0]
        needed = stored_bytes(archive.read(f"{root}/data.pkl"))
    for record in records:
        key = record.filename.removeprefix(f"{root}/data/")
        if record.file_size < needed.get(key, 0):
            raise Damaged(
                f"{name}: the record data/{key} is shorter than its tensor: {record.file_size} of "
                f"{needed[key]} bytes"
            )


def stored_bytes(pickled: bytes) -> dict[str, int]:
    """Storage key -> bytes, for storages that a pickle of `torch.save` names. Raises BadPickle."""
    found: dict[str, int] = {}

    def persistent(pid: Any) -> None:
        _, kind, key, _, elements = pid[:5]
        dtype = getattr(getattr(torch, kind.__name__, None), "dtype", torch.uint8)
        found[key] = max(found.get(key, 0), elements * dtype.itemsize)

    inert_pickle.read(pickled, persistent)
    return found


def _probe_error(path: Path, error: Exception, otherwise: str) -> Exception:
    """Converts any exception from reading a file to the exception to raise."""
    if isinstance(error, (ProbeError, MemoryError)):
        return error
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    if isinstance(error, pickle.UnpicklingError) and found:
        return ProbeError(
            f"{path} holds more than tensors and plain values (a {found[1]}), and loading it could "
            "execute code: save only the state dictionaries, and probe that file"
        )
    if isinstance(error, OSError):
        return ProbeError(f"{path} cannot be read: {error.strerror or error}")
    # torch explains `weights_only` at length before it reports the error.
    why = re.search(r"WeightsUnpickler error:\s*(\S.{,199})", str(error))
    return ProbeError(f"{otherwise}: {why[1] if why else first_line(error)}")


def _contents(format: str, tree: Any, budget: PathBudget, at: tuple[str, ...] = ()) -> Contents:
    arrays, values, notes = [], {}, []
    for keys, leaf in _leaves(tree, budget, at):
        path = tuple(part for key in keys for part in key.split("."))  # "layers.0.weight"
        path = budget.take(path) or ("tensor",)  # the whole file is one tensor
        if isinstance(leaf, Tensor):
            if hasattr(leaf, "to_local"):  # a DTensor
                leaf = leaf.to_local()  # type: ignore[attr-defined]
            if (
                leaf.layout is not torch.strided
                or leaf.is_quantized
                or leaf.is_meta
                or leaf.is_nested
            ):
                notes.append(f"{dotted(path)} was not looked at: a tensor of {leaf.layout}")
                continue
            arrays.append(_array(path, leaf))
        elif isinstance(leaf, _SCALARS):
            values[path] = leaf
    return Contents(format, arrays, values, tuple(notes))


def _leaves(
    tree: Any, budget: PathBudget, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    budget.take(path)
    if isinstance(tree, Mapping):
        for key, part in tree.items():
            yield from _leaves(part, budget, (*path, str(key)))
    elif isinstance(tree, (list, tuple)):
        for number, part in enumerate(tree):
            yield from _leaves(part, budget, (*path, str(number)))
    else:
        yield path, tree


def _array(path: tuple[str, ...], tensor: Tensor) -> Array:
    dtype = str(tensor.dtype).removeprefix("torch.")
    # Tensors with the same part of a storage are one tensor. Empty tensors share nothing.
    storage = None
    if tensor.numel():
        start = tensor.untyped_storage().data_ptr()
        storage = (start, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), dtype)
    return Array(path, dtype, tuple(tensor.shape), lambda: _pieces(tensor), storage)


def _pieces(tensor: Tensor) -> Iterator[np.ndarray]:
    """Yields a tensor's elements as NumPy arrays, and copies at most one piece at a time."""
    flat = _distinct(tensor.detach())
    flat = flat.view(-1) if flat.is_contiguous() else flat.reshape(-1)
    for at in range(0, flat.numel(), PIECE):
        piece = flat[at : at + PIECE]
        if piece.is_floating_point() and piece.dtype not in (torch.float32, torch.float64):
            piece = piece.float()
        yield piece.resolve_conj().resolve_neg().numpy()


def _distinct(tensor: Tensor) -> Tensor:
    """The elements of a tensor without the repetitions of `expand` and overlapping views."""
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in axes)
    return tensor.as_strided((span,), (1,)) if tensor.numel() > span else tensor


def _index(folder: Path) -> dict[str, tuple[tuple[str, ...], IndexEntry]]:
    """Name -> path in the tree and entry, for the entries of `.metadata`."""
    at = folder / INDEX
    try:
        entries = dcp_index.read(at)
        budget = PathBudget(at.stat().st_size)
        return {
            name: (budget.take(_split(name, entry.planned)), entry)
            for name, entry in entries.items()
        }
    except OSError as error:
        raise ProbeError(f"{at} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ProbeError(f"{at} is damaged: {first_line(error)}") from None


def _split(name: str, planned: Any) -> tuple[str, ...]:
    """The path of an entry in the tree: the planner's path, or the parts of the name."""
    if (
        isinstance(planned, (tuple, list))
        and 0 < len(planned) <= MOST_PARTS
        and all(
            type(each) is str or (type(each) is int and 0 <= each < 1 << 62) for each in planned
        )
    ):
        return tuple(part for each in planned for part in str(each).split("."))
    return tuple(name.split("."))


def _sharded(folder: Path, path: tuple[str, ...], name: str, entry: IndexEntry) -> Array:
    def read() -> Iterator[np.ndarray]:
        if len(entry.places) != len(entry.chunks):
            counts = f"{len(entry.places)} of {len(entry.chunks)} parts of {name} are present"
            raise ProbeError(f"{folder}: {counts}")
        for place in entry.places.values():
            tensor = _part(folder, place)
            if not isinstance(tensor, Tensor):
                raise ProbeError(f"{folder / place.file}: {name} is not a tensor in this file")
            yield from _pieces(tensor)

    return Array(path, entry.dtype, entry.shape, read, name)


def _part(folder: Path, place: Place) -> Any:
    """The tensor or value in one place of one file."""
    at = folder / place.file
    if not place.plain:
        raise ProbeError(f"{at} is compressed or transformed, which healcore cannot read")
    try:
        if not at.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        with open(at, "rb", opener=regular_file.opener) as file:
            if place.offset + place.length > os.fstat(file.fileno()).st_size:
                raise ProbeError(f"{at} is damaged: it is shorter than the index says")
            file.seek(place.offset)
            part = io.BytesIO(file.read(place.length))
        _check_records(part, str(at))
        part.seek(0)
        return _load(part)
    except Exception as error:
        raise _probe_error(at, error, f"{at} is damaged") from None
