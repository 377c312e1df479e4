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
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
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
from healcore.checkpoint_contents import Array, Contents, Damaged, ProbeError, first_line
from healcore.torch import dcp_index


def open_file(path: Path) -> Contents:
    """Opens a file of `torch.save` or safetensors.

    A file of `torch.save` is memory-mapped, or read as a whole before torch 1.6 (no zip).

    Raises:
        Damaged: the header of a safetensors file is invalid, or does not match the arrays.
        ProbeError: the file is damaged, or has objects that are not plain values.
    """
    with open(path, "rb", opener=regular_file.opener) as file:
        start = file.read(9)
        mapped = zipfile.is_zipfile(file)
    if start[:2] == b"PK" and not mapped:
        raise ProbeError(f"{path} is cut off: the directory at the end of its archive is missing")
    if start[8:] != b"{":
        return _contents("torch file", _load(path, path, mmap=mapped))
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise Damaged(f"{path}: safetensors rejects its header: {first_line(error)}") from None
    return _contents("safetensors", tensors)


def open_directory(folder: Path) -> Contents:
    """Opens a directory of DCP. Raises ProbeError if the index cannot be read."""
    try:
        index = dcp_index.read(folder / dcp_index.INDEX)
    except ValueError as error:
        raise ProbeError(
            f"{folder / dcp_index.INDEX} cannot be read: {first_line(error)}"
        ) from None
    places: dict[str, list[_StorageInfo]] = {}
    for key, place in index.storage_data.items():
        places.setdefault(key.fqn, []).append(place)
    leaves: dict[tuple[str, ...], Any] = {}
    notes = []
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
    return tuple(part for key in keys for part in str(key).split("."))


class _Inert(list[Any]):
    """Stands for an object of a class that is not imported: a list of its contents."""

    def __new__(cls, *contents: Any) -> _Inert:
        self = super().__new__(cls)
        self.extend(contents)
        return self

    def __init__(self, *_: Any) -> None:
        """Keeps the contents."""

    __setstate__ = list.append
    __hash__ = object.__hash__  # type: ignore[assignment]  # it may be a key


def _load(source: Any, path: Path, *, mmap: bool = False, inert: tuple[str, ...] = ()) -> Any:
    """Loads what `torch.save` wrote, with an `_Inert` for each object of the classes in `inert`.

    Raises ProbeError for functions of Python and of the system, and for damage.
    """
    numpy: list[Any] = [np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0], np.ndarray]
    numpy += [np.dtype, *{type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdgFD"}]
    try:
        with torch.serialization.safe_globals([*numpy, *((_Inert, name) for name in inert)]):
            file = io.BytesIO(source) if isinstance(source, bytes) else source
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # damaged bytes may raise any exception
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and found:
            # torch refuses modules of the system, and names builtins without their module.
            if "not an allowed global" in str(error) and found[1] not in inert:
                return _load(source, path, mmap=mmap, inert=(*inert, found[1]))
            raise ProbeError(
                f"{path} holds more than tensors and plain values (a {found[1]}), and loading it "
                "could execute code: save only the state dictionaries, and probe that file"
            ) from None
        # torch explains `weights_only` at length before it reports the error.
        why = re.search(r"WeightsUnpickler error:\s*(\S.{,199})", str(error))
        reason = why[1] if why else first_line(error)
        raise ProbeError(f"{path} is not a torch checkpoint, or is damaged: {reason}") from None


def _contents(format: str, tree: Any, at: tuple[str, ...] = ()) -> Contents:
    leaves: dict[tuple[str, ...], Any] = {}
    notes = []
    # Writers of safetensors sort by size and name, so the order of the model is lost.
    in_order = format != "safetensors"
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
            dtype, shape = str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape)
            # Tensors with the same part of a storage are one tensor. Empty tensors share nothing.
            storage = (leaf.data_ptr(), shape, leaf.stride(), dtype) if leaf.numel() else None
            leaves[path] = Array(dtype, shape, partial(_flat, leaf), storage, in_order)
        elif isinstance(leaf, (bool, int, float, str, type(None))):
            leaves[path] = leaf
    return Contents(format, leaves, tuple(notes))


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, (Mapping, list, tuple)):
        for key, part in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _leaves(part, (*path, str(key)))
    else:
        yield path, tree


def _flat(tensor: Tensor) -> np.ndarray:
    flat = tensor.detach().reshape(-1)
    if flat.is_floating_point() and flat.dtype not in (torch.float32, torch.float64):
        flat = flat.float()
    return flat.resolve_conj().resolve_neg().numpy()


def _read_sharded(folder: Path, name: str, places: list[_StorageInfo], count: int) -> np.ndarray:
    if len(places) != count:
        raise ProbeError(f"{folder}: {len(places)} of {count} parts of {name} are present")
    return np.concatenate([_flat(_part(folder, place)) for place in places])


def _part(folder: Path, place: _StorageInfo) -> Any:
    """The tensor or value in one place of one file."""
    at = folder / place.relative_path
    with open(at, "rb", opener=regular_file.opener) as file:
        file.seek(place.offset)
        return _load(file.read(place.length), at)
