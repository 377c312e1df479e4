"""Opening torch checkpoints for `healcore probe`. Nothing in them is executed."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from healcore.tools.probe.contents.contents import PIECE, Array, Contents, Names, flattened
from healcore.tools.probe.contents.records import check_archive, check_legacy
from healcore.tools.probe.verdict import ProbeError

_SCALARS = (bool, int, float, str, type(None))


def open_file(path: Path) -> Contents:
    """A file of `torch.save`: mapped, so that an array is in memory while it is looked at.

    Files of torch before 1.6 (no zip) cannot be mapped, and are read as a whole.

    Takes memory for the list of its tensors and values, some hundred bytes for each byte of the
    pickle in it, and time in proportion to the file: see `torch_pickle` and `Names`.

    Raises:
        Damaged: a record is shorter than its tensor.
        ProbeError: it is none, it is damaged, or it holds more than tensors and plain values.
    """
    try:
        mapped = zipfile.is_zipfile(path)
        # Before torch sees it: torch allocates what a file asks for.
        if mapped:
            with zipfile.ZipFile(path) as archive:
                size = check_archive(archive, str(path), path.stat().st_size).pickled
        else:
            size = check_legacy(path)
        loaded = load(path, mmap=mapped)
    except ProbeError:
        raise
    except pickle.UnpicklingError as error:
        raise ProbeError(refused(path, error)) from None
    except OSError as error:
        raise ProbeError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # damaged bytes raise anything
        raise ProbeError(
            f"{path} is no torch checkpoint, or is damaged: {first_line(error)}"
        ) from None
    try:
        return contents_of("torch file", loaded, Names(size))
    except ProbeError as error:
        raise ProbeError(f"{path}: {error}") from None


def load(source: Any, *, mmap: bool = False) -> Any:
    """What `torch.save` wrote, if it is tensors and plain values.

    Raises:
        pickle.UnpicklingError: it is more.
        Exception: whatever damaged bytes make torch raise.
    """
    # NumPy's numbers are in many checkpoints (a best metric). To make one executes nothing.
    with torch.serialization.safe_globals(_numpy_globals()):
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)


def _numpy_globals() -> list[Any]:
    number = np.float64(0)
    constructor = number.__reduce__()[0]
    kinds = {type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdgFD"}
    return [constructor, np.dtype, *kinds]


def contents_of(format: str, tree: Any, names: Names, at: tuple[str, ...] = ()) -> Contents:
    """The contents that a tree makes.

    Raises:
        ProbeError: there is no end to it, see `Names`.
    """
    arrays, values, notes = [], {}, []
    for keys, leaf in flattened(tree, names, at):
        path = tuple(part for key in keys for part in key.split("."))  # "layers.0.weight"
        path = names.take(path) or ("tensor",)  # the whole file is one
        if isinstance(leaf, Tensor):
            if hasattr(leaf, "to_local"):  # of a DTensor its part
                leaf = leaf.to_local()  # type: ignore[attr-defined]
            if (
                leaf.layout is not torch.strided
                or leaf.is_quantized
                or leaf.is_meta
                or leaf.is_nested
            ):
                notes.append(f"{'.'.join(path)} was not looked at: a tensor of {leaf.layout}")
                continue
            arrays.append(_array(path, leaf))
        elif isinstance(leaf, _SCALARS):
            values[path] = leaf
    return Contents(format, arrays, values, tuple(notes))


def _array(path: tuple[str, ...], tensor: Tensor) -> Array:
    def read() -> Iterator[np.ndarray]:
        return pieces(tensor)

    dtype = str(tensor.dtype).removeprefix("torch.")
    # What one storage holds twice is one tensor under two names. Empty ones share nothing.
    storage = None
    if tensor.numel():
        start = tensor.untyped_storage().data_ptr()
        storage = (start, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), dtype)
    return Array(path, dtype, tuple(tensor.shape), read, storage)


def pieces(tensor: Tensor) -> Iterator[np.ndarray]:
    """A tensor's elements as NumPy arrays; no copy of more than a piece."""
    flat = _distinct(tensor.detach())
    flat = flat.view(-1) if flat.is_contiguous() else flat.reshape(-1)
    for at in range(0, flat.numel(), PIECE):
        piece = flat[at : at + PIECE]
        if piece.is_floating_point() and piece.dtype not in (torch.float32, torch.float64):
            piece = piece.float()
        yield piece.resolve_conj().resolve_neg().numpy()


def _distinct(tensor: Tensor) -> Tensor:
    """What lies behind a view that shows some elements many times: of `expand`, each one once."""
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in axes)
    return tensor.as_strided((span,), (1,)) if tensor.numel() > span else tensor


def refused(path: Path, error: Exception) -> str:
    """Why `weights_only` did not want a file, in words."""
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    what = f"a {found[1]}" if found else first_line(error)
    return (
        f"{path} holds more than tensors and plain values ({what}), and making that could execute "
        "code: save the state dictionaries alone and probe that file"
    )


def first_line(error: Exception) -> str:
    """An error in one line."""
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__
