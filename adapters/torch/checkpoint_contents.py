"""Opens torch checkpoints: files of `torch.save`, directories of `torch.distributed.checkpoint`.

Nothing in them is executed, so DCP's own reader is not used: its index and the values besides the
tensors are pickles.
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
    PathBudget,
    ProbeError,
    dotted,
    first_line,
)
from healcore.torch import dcp_index
from healcore.torch.checkpoint_pickle import (
    TorchArchive,
    check_archive,
    check_legacy_file,
    plain_tensor,
)
from healcore.torch.dcp_index import INDEX, IndexEntry, Place

_SCALARS = (bool, int, float, str, type(None))
_DTYPES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}  # fmt: skip


def open_file(path: Path) -> Contents:
    """Opens a file of `torch.save`, mapped; those of torch before 1.6 (no zip) are read as a whole.

    Memory is at most some hundred bytes for each byte of the pickle in it, and time is proportional
    to the file: see `checkpoint_pickle` and `PathBudget`.

    Raises:
        Damaged: a record is shorter than its tensor.
        ProbeError: it is none, it is damaged, or it holds more than tensors and plain values.
    """
    try:
        mapped = zipfile.is_zipfile(path)
        # Checked before torch reads it, which allocates whatever size a file names.
        if mapped:
            with zipfile.ZipFile(path) as archive:
                size = check_archive(archive, str(path), path.stat().st_size).pickled
        else:
            size = check_legacy_file(path)
        loaded = _load(path, mmap=mapped)
    except Exception as error:
        raise _probe_error(path, error, f"{path} is no torch checkpoint, or is damaged") from None
    try:
        return _contents("torch file", loaded, PathBudget(size))
    except ProbeError as error:
        raise ProbeError(f"{path}: {error}") from None


def open_directory(folder: Path) -> Contents:
    """Opens a directory of `torch.distributed.checkpoint`; ProbeError if its index cannot be read.

    One shard is in memory at a time.
    """
    arrays, values, notes = [], {}, []
    for name, (path, entry) in _index(folder).items():
        if entry.chunks:
            arrays.append(_sharded(folder, path, name, entry))
            continue
        for place in [*entry.places.values()][:1]:
            try:
                value, size = _part(folder, place)
                part = _contents("", value, PathBudget(size), path)
            except ProbeError as error:
                notes.append(f"{name} was not looked at: {error}")
                continue
            arrays += part.arrays
            values |= part.values
    return Contents("DCP directory", arrays, values, tuple(notes))


def stored_arrays(data: Path, names: Iterable[str]) -> dict[str, Array]:
    """Those of the named arrays that a checkpoint of `DCPStore` has; ProbeError if it is damaged.

    `data` is its directory `data`, and names are those of its `state.json`.
    """
    index = _index(data)
    return {
        name: _sharded(data, (name,), name, index[name][1])
        for name in names
        if name in index and index[name][1].chunks
    }


def _load(source: Any, *, mmap: bool = False) -> Any:
    """What `torch.save` wrote, if it is tensors, plain values and NumPy's numbers (a best metric).

    Anything else raises `UnpicklingError`.
    """
    constructor: Any = np.float64(0).__reduce__()[0]
    kinds = {type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdgFD"}
    with torch.serialization.safe_globals([constructor, np.dtype, *kinds]):
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)


def _probe_error(path: Path, error: Exception, otherwise: str) -> ProbeError:
    """The ProbeError for an error of reading a file, which may be any if the file is damaged."""
    if isinstance(error, ProbeError):
        return error
    if isinstance(error, pickle.UnpicklingError):
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"a {found[1]}" if found else first_line(error)
        return ProbeError(
            f"{path} holds more than tensors and plain values ({what}), and making that could "
            "execute code: save the state dictionaries alone and probe that file"
        )
    if isinstance(error, OSError):
        return ProbeError(f"{path} cannot be read: {error.strerror or error}")
    return ProbeError(f"{otherwise}: {first_line(error)}")


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
    # The same part of a storage is one tensor under two names, unless it is empty.
    storage = None
    if tensor.numel():
        start = tensor.untyped_storage().data_ptr()
        storage = (start, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), dtype)
    return Array(path, dtype, tuple(tensor.shape), lambda: _pieces(tensor), storage)


def _pieces(tensor: Tensor) -> Iterator[np.ndarray]:
    """A tensor's elements as NumPy arrays; at most one piece is copied at a time."""
    flat = _distinct(tensor.detach())
    flat = flat.view(-1) if flat.is_contiguous() else flat.reshape(-1)
    for at in range(0, flat.numel(), PIECE):
        piece = flat[at : at + PIECE]
        if piece.is_floating_point() and piece.dtype not in (torch.float32, torch.float64):
            piece = piece.float()
        yield piece.resolve_conj().resolve_neg().numpy()


def _distinct(tensor: Tensor) -> Tensor:
    """The elements of a tensor without the repetitions that `expand` and overlapping views have."""
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in axes)
    return tensor.as_strided((span,), (1,)) if tensor.numel() > span else tensor


def _index(folder: Path) -> dict[str, tuple[tuple[str, ...], IndexEntry]]:
    """The entries of `.metadata`, by name, each with its path in the tree."""
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
    """The path of an entry in the tree: the planner's, or without one the name's parts."""
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
            there = f"{len(entry.places)} of {len(entry.chunks)} parts of {name} are there"
            raise ProbeError(f"{folder}: {there}")
        for place in entry.places.values():
            tensor, _ = _part(folder, place)
            if not isinstance(tensor, Tensor):
                raise ProbeError(f"{folder / place.file}: {name} is no tensor there")
            yield from _pieces(tensor)

    return Array(path, entry.dtype, entry.shape, read, name)


def _part(folder: Path, place: Place) -> tuple[Any, int]:
    """The tensor or value in one place of one file, and the size of its pickle."""
    at = folder / place.file
    if not place.plain:
        raise ProbeError(f"{at} is compressed or transformed, which healcore does not undo")
    try:
        if not at.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        with open(at, "rb", opener=regular_file.opener) as file:
            if place.offset + place.length > os.fstat(file.fileno()).st_size:
                raise ProbeError(f"{at} is damaged: it ends before what should lie in it")
            file.seek(place.offset)
            data = file.read(place.length)
        file = io.BytesIO(data)
        with zipfile.ZipFile(file) as archive:
            checked = check_archive(archive, str(at), len(data))
            tensor = _tensor(checked)
        file.seek(0)
        return (_load(file) if tensor is None else tensor), checked.pickled
    except Exception as error:
        raise _probe_error(at, error, f"{at} is damaged") from None


def _tensor(checked: TorchArchive) -> Tensor | None:
    """The tensor in a part, in a third of the time of torch.load; None if it is something else."""
    plain = plain_tensor(checked.value)
    dtype = None if plain is None else _DTYPES.get(plain[0].kind)
    if plain is None or dtype is None:
        return None
    storage, offset, shape, strides = plain
    content = checked.content(storage) if storage.bytes else None
    if not content:
        return None
    return torch.frombuffer(bytearray(content), dtype=dtype).as_strided(shape, strides, offset)
