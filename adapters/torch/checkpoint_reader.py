"""Opens files of `torch.save` and safetensors, and directories of `torch.distributed.checkpoint`.

No code of a file runs: `torch.load(weights_only=True)` reads the files of torch. The index of a DCP
directory is a pickle too, in which DCP's reader would import any class; here only the classes of an
index are known. A file may still name any size, so `healcore.tools.probe` calls this module in a
process with limits.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from healcore import regular_file
from healcore.checkpoint_contents import Array, Contents, Damaged, ProbeError, first_line, leaves_of


def open_file(path: Path) -> Contents:
    """Opens a file of `torch.save` or safetensors.

    A file of `torch.save` is memory-mapped. Before torch 1.6 it was no archive, and is rejected.

    Args:
        path: the file. Its first bytes say which of the two formats it has.

    Returns:
        The arrays and plain values of the file, by path. An array is read when it is used.

    Raises:
        Damaged: the header of a safetensors file is invalid, or does not match the arrays.
        ProbeError: the file is damaged, or has objects that are not plain values.
    """
    with open(path, "rb", opener=regular_file.opener) as file:
        start = file.read(9)
    if start[8:] != b"{":
        return _contents("torch file", _load(path))
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise Damaged(f"{path}: safetensors rejects its header: {first_line(error)}") from None
    return _contents("safetensors", tensors)


def open_directory(folder: Path) -> Contents:
    """Opens a directory of `torch.distributed.checkpoint`, with the parts of all ranks.

    Args:
        folder: the directory with the file `.metadata`.

    Returns:
        The tensors of the directory, by path. A tensor is read when it is used. Other values are
        pickles, and not looked at.

    Raises:
        ProbeError: the index cannot be read.
    """
    index = read_index(folder)
    leaves: dict[tuple[str, ...], Any] = {}
    for name, entry in index.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        dtype = str(entry.properties.dtype).removeprefix("torch.")

        def read(name: str = name, entry: TensorStorageMetadata = entry) -> np.ndarray:
            tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
            read_tensors(folder, index, {name: tensor}, no_dist=True)
            return _flat(tensor)

        leaves[tuple(name.split("."))] = Array(dtype, tuple(entry.size), read, name)
    return Contents("DCP directory", leaves)


class _Unimported(list[Any]):
    """Takes the place of an object of the program, whose class is not imported: its contents."""

    def __new__(cls, *contents: Any) -> _Unimported:
        self = super().__new__(cls)
        self.extend(contents)
        return self

    def __init__(self, *_: Any) -> None:
        """Keeps the contents."""

    __setstate__ = list.append
    __hash__ = object.__hash__  # type: ignore[assignment]  # it may be a key


def _load(path: Path) -> Any:
    """Loads what `torch.save` wrote, memory-mapped, without importing classes of the program.

    Raises:
        ProbeError: the file is damaged, or names a function of Python or of the system.
    """
    # What a pickle of NumPy's scalars and arrays may name.
    allowed: list[Any] = [np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0]]
    allowed += [np.ndarray, np.dtype, *{type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdgFD"}]
    try:
        with torch.serialization.safe_globals(allowed):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        for name in names:
            if not name.startswith("builtins."):  # no class: exec, getattr
                allowed.append((_Unimported, name))
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except MemoryError:
        raise
    except pickle.UnpicklingError:
        raise ProbeError(
            f"{path} holds more than tensors and plain values, and loading it could execute code, "
            "or it is damaged: save only the state dictionaries, and probe that file"
        ) from None
    except Exception as error:  # damaged bytes may raise any exception
        reason = first_line(error)
        raise ProbeError(f"{path} is not a torch checkpoint, or is damaged: {reason}") from None


def _contents(format_name: str, tree: Any) -> Contents:
    """The tensors and plain values of a tree. Other objects have no leaf; some have a note."""
    leaves: dict[tuple[str, ...], Any] = {}
    notes: list[str] = []
    # Writers of safetensors sort by size and name, so the order of the model is lost.
    in_order = format_name != "safetensors"
    for path, leaf in leaves_of(tree, ()):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fc":
            leaf = torch.from_numpy(leaf)
        if isinstance(leaf, Tensor):
            if leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_nested:
                notes.append(f"{'.'.join(path)} was not looked at: a tensor of {leaf.layout}")
                continue
            dtype = str(leaf.dtype).removeprefix("torch.")
            shape = tuple(leaf.shape)
            # Tensors with the same part of a storage are one tensor. Empty tensors share nothing.
            storage = None
            if leaf.numel():
                storage = (leaf.data_ptr(), shape, leaf.stride(), dtype)
            leaves[path] = Array(dtype, shape, partial(_flat, leaf), storage, in_order)
        elif isinstance(leaf, (bool, int, float, str, type(None))):
            leaves[path] = leaf
    return Contents(format_name, leaves, tuple(notes))


def _flat(tensor: Tensor) -> np.ndarray:
    """The values of a tensor in one dimension, in a dtype that NumPy has."""
    flat = tensor.detach().reshape(-1)
    if flat.is_floating_point() and flat.dtype not in (torch.float32, torch.float64):
        flat = flat.float()
    return flat.resolve_conj().resolve_neg().numpy()


# -- directories of DCP ----------------------------------------------------------------------------

_KINDS = (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    filesystem._StorageInfo,
)
_CLASSES = {f"{kind.__module__}.{kind.__name__}": kind for kind in _KINDS}
"""Classes of DCP that describe tensors, by the name in a pickle."""


class _Unpickler(pickle.Unpickler):
    """Loads an index of DCP without a class or function that the file could misuse."""

    def find_class(self, module: str, name: str) -> Any:
        # Types that are written in C, whose attributes a pickle cannot set.
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if name == "_MEM_FORMAT_ENCODING":
            return lambda number: metadata._MEM_FORMAT_ENCODING(number)
        # A new class, because a pickle can set attributes of a class.
        return type(name, (_CLASSES.get(f"{module}.{name}", _Unimported),), {})


def read_index(folder: Path) -> Metadata:
    """Reads the index of a DCP directory without running code of the file.

    Args:
        folder: the directory.

    Returns:
        The tensors, whose places are in files of the directory. DCP would unpickle other values.

    Raises:
        ProbeError: the content is not what DCP writes.
        OSError: the file cannot be read.
    """
    path = folder / ".metadata"
    content = regular_file.read(path)
    places: dict[MetadataIndex, filesystem._StorageInfo] = {}
    try:
        index = _Unpickler(io.BytesIO(content)).load()
        for key, place in index.storage_data.items():
            name = place.relative_path
            if not name or name != Path(name).name:
                raise ValueError(f"it names a file outside the directory: {name[:200]}")
            # Of DCP's own class, because a key is equal to keys of its class only.
            places[MetadataIndex(key.fqn, key.offset)] = place
        entries = index.state_dict_metadata.items()
        tensors = {name: x for name, x in entries if isinstance(x, TensorStorageMetadata)}
        return Metadata({**tensors}, storage_data=places)
    except Exception as error:  # crafted bytes may raise any exception
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ProbeError(f"{path} cannot be read: {reason}") from None


def read_tensors(folder: Path, index: Metadata, tensors: dict[str, Tensor], **options: Any) -> None:
    """Reads tensors of a DCP directory.

    Args:
        folder: the directory.
        index: its index.
        tensors: name -> memory of the stored size, or a DTensor for the part of this rank.
        **options: which ranks read together, see `torch.distributed.checkpoint.load`.

    Raises:
        ProbeError: a file is missing, cut off, or not what DCP writes; on every rank.
    """
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninit")
    reader = FileSystemReader(folder)
    reader.read_metadata = lambda: index  # DCP would unpickle its file
    try:
        load(tensors, storage_reader=reader, **options)
    except CheckpointException as error:  # a BaseException with the errors of all ranks
        failure = next(iter(error.failures.values()))[0]
        reason = f"{type(failure).__name__}: {failure!s:.200}"
        raise ProbeError(f"{folder} cannot be read by DCP: {reason}") from error
