"""Opens files of `torch.save` and safetensors, and directories of `torch.distributed.checkpoint`.

`torch.load(weights_only=True)` runs no code of a file. But it allocates any size that a file names,
so `healcore.tools.probe` calls this module in a process with limits. DCP's own reader is not used,
because it unpickles its index and all values that are not tensors.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from healcore import regular_file
from healcore.plugins.checkpoint_contents import (
    Array,
    Contents,
    Damaged,
    ProbeError,
    dotted,
    first_line,
)
from healcore.torch import dcp_index
from healcore.torch.dcp_index import INDEX

_SCALARS = (bool, int, float, str, type(None))


def open_file(path: Path) -> Contents:
    """Opens a file of `torch.save` or safetensors.

    A file of `torch.save` is memory-mapped, or read as a whole before torch 1.6 (no zip).

    Raises:
        Damaged: the header of a safetensors file is invalid, or does not match the arrays.
        ProbeError: the file is damaged, or has objects that are not plain values.
    """
    with open(path, "rb", opener=regular_file.opener) as file:
        is_safetensors = file.read(9)[8:] == b"{"
        mapped = zipfile.is_zipfile(file)
    if not is_safetensors:
        return _contents("torch file", _load(path, path, mmap=mapped))
    try:
        contents = _contents("safetensors", load_file(path))
    except SafetensorError as error:
        raise Damaged(f"{path}: safetensors rejects its header: {first_line(error)}") from None
    # Writers sort by size and name, so the order of the model is lost.
    return contents._replace(arrays=[each._replace(in_order=False) for each in contents.arrays])


def open_directory(folder: Path) -> Contents:
    """Opens a directory of DCP. Raises ProbeError if the index cannot be read."""
    try:
        index = dcp_index.read(folder / INDEX)
    except ValueError as error:
        raise ProbeError(f"{folder / INDEX} cannot be read: {first_line(error)}") from None
    places: dict[str, list[_StorageInfo]] = {}
    for key, place in index.storage_data.items():
        places.setdefault(key.fqn, []).append(place)
    arrays, values, notes = [], {}, []
    for name, entry in index.state_dict_metadata.items():
        keys = index.planner_data.get(name, name.split("."))
        path = tuple(part for key in keys for part in str(key).split("."))
        if isinstance(entry, TensorStorageMetadata):
            arrays.append(_sharded(folder, path, name, entry, places.get(name, [])))
            continue
        for place in places.get(name, [])[:1]:
            try:
                part = _contents("", _part(folder, place), path)
            except ProbeError as error:
                notes.append(f"{name} was not looked at: {error}")
                continue
            arrays += part.arrays
            values |= part.values
    return Contents("DCP directory", arrays, values, tuple(notes))


def _load(source: Any, path: Path, *, mmap: bool = False) -> Any:
    """Loads tensors, plain values and NumPy scalars (a best metric) of `torch.save`.

    Raises ProbeError for other objects, and for damage.
    """
    constructor: Any = np.float64(0).__reduce__()[0]
    kinds = {type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdgFD"}
    try:
        with torch.serialization.safe_globals([constructor, np.dtype, *kinds]):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # damaged bytes may raise any exception
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and found:
            raise ProbeError(
                f"{path} holds more than tensors and plain values (a {found[1]}), and loading it "
                "could execute code: save only the state dictionaries, and probe that file"
            ) from None
        # torch explains `weights_only` at length before it reports the error.
        why = re.search(r"WeightsUnpickler error:\s*(\S.{,199})", str(error))
        reason = why[1] if why else first_line(error)
        raise ProbeError(f"{path} is not a torch checkpoint, or is damaged: {reason}") from None


def _contents(format: str, tree: Any, at: tuple[str, ...] = ()) -> Contents:
    arrays, values, notes = [], {}, []
    for keys, leaf in _leaves(tree, at):
        path = tuple(part for key in keys for part in key.split("."))  # "layers.0.weight"
        path = path or ("tensor",)  # the whole file is one tensor
        if isinstance(leaf, Tensor):
            if hasattr(leaf, "to_local"):  # a DTensor
                leaf = leaf.to_local()  # type: ignore[attr-defined]
            if leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_nested:
                notes.append(f"{dotted(path)} was not looked at: a tensor of {leaf.layout}")
                continue
            arrays.append(_array(path, leaf))
        elif isinstance(leaf, _SCALARS):
            values[path] = leaf
    return Contents(format, arrays, values, tuple(notes))


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, Mapping):
        for key, part in tree.items():
            yield from _leaves(part, (*path, str(key)))
    elif isinstance(tree, (list, tuple)):
        for number, part in enumerate(tree):
            yield from _leaves(part, (*path, str(number)))
    else:
        yield path, tree


def _array(path: tuple[str, ...], tensor: Tensor) -> Array:
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    # Tensors with the same part of a storage are one tensor. Empty tensors share nothing.
    storage = (tensor.data_ptr(), shape, tensor.stride(), dtype) if tensor.numel() else None
    return Array(path, dtype, shape, lambda: _flat(tensor), storage)


def _flat(tensor: Tensor) -> np.ndarray:
    flat = tensor.detach().reshape(-1)
    if flat.is_floating_point() and flat.dtype not in (torch.float32, torch.float64):
        flat = flat.float()
    return flat.resolve_conj().resolve_neg().numpy()


def _sharded(
    folder: Path,
    path: tuple[str, ...],
    name: str,
    entry: TensorStorageMetadata,
    places: list[_StorageInfo],
) -> Array:
    def read() -> np.ndarray:
        if len(places) != len(entry.chunks):
            counts = f"{len(places)} of {len(entry.chunks)} parts of {name} are present"
            raise ProbeError(f"{folder}: {counts}")
        return np.concatenate([_flat(_part(folder, place)) for place in places])

    dtype = str(entry.properties.dtype).removeprefix("torch.")
    return Array(path, dtype, tuple(entry.size), read, name)


def _part(folder: Path, place: _StorageInfo) -> Any:
    """The tensor or value in one place of one file."""
    at = folder / place.relative_path
    with open(at, "rb", opener=regular_file.opener) as file:
        file.seek(place.offset)
        part = io.BytesIO(file.read(place.length))
    return _load(part, at)
