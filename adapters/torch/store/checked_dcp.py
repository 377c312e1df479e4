"""DCP's index checked before DCP gets to see it: what it says has to be what a checkpoint holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from healcore.runtime.store import manifest
from healcore.runtime.store.digest import Digest
from healcore.runtime.store.errors import Untrusted
from healcore.torch import dcp_index
from healcore.torch.dcp_index import INDEX, Place, Shape
from healcore.torch.plain_values import DTYPES


class CheckedReader(FileSystemReader):
    """DCP's reader with an index that is read already."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index; the file is not opened again."""
        del args, kwargs
        return self._metadata


def checked(
    data: Path, files: Mapping[str, Digest], wanted: Mapping[str, tuple[str, Shape]]
) -> Metadata:
    """The part of an index that DCP needs for some tensors, made of DCP's own classes.

    Args:
        data: the directory of the index.
        files: of the manifest, all of them verified.
        wanted: name of a tensor -> dtype and shape that it has to have.

    Raises:
        Untrusted: it is not what DCP writes, or says something else than `wanted`.
    """
    try:
        entries = dcp_index.read(data / INDEX, only_dcp=True)
    except OSError as error:
        raise _refused(data, f"it cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise _refused(data, str(error)) from None
    metadata: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for name, (dtype, shape) in wanted.items():
        entry = entries.get(name)
        if entry is None or not entry.dtype:
            raise _refused(data, f"{name:.200} is no tensor in it")
        if (entry.dtype, entry.shape) != (dtype, shape):
            is_in_it = f"{entry.dtype}{list(entry.shape)}"
            raise _refused(data, f"{name:.200} is {is_in_it:.200} in it, not {dtype}{list(shape)}")
        if sum(math.prod(sizes) for _, sizes in entry.chunks) != math.prod(shape):
            raise _refused(data, f"the parts of {name:.200} are not the whole")
        kind = DTYPES[dtype]
        chunks = []
        for number, (offsets, sizes) in enumerate(entry.chunks):
            place = entry.places.get(offsets)
            if place is None or not _fits(offsets, sizes, shape):
                raise _refused(data, f"a part of {name:.200} is outside of it or not there")
            nbytes = kind.itemsize * math.prod(sizes)
            _check_place(data, files, name, place, nbytes)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            at = MetadataIndex(name, torch.Size(offsets), number)
            storage[at] = _StorageInfo(place.file, place.offset, place.length)
        metadata[name] = TensorStorageMetadata(TensorProperties(kind), torch.Size(shape), chunks)
    return Metadata(metadata, storage_data=storage, storage_meta=StorageMeta())


def _fits(offsets: Shape, sizes: Shape, shape: Shape) -> bool:
    return len(offsets) == len(sizes) == len(shape) and all(
        start + size <= whole for start, size, whole in zip(offsets, sizes, shape, strict=True)
    )


def _check_place(
    data: Path, files: Mapping[str, Digest], name: str, place: Place, nbytes: int
) -> None:
    """A file that the manifest knows, beside the index, with room for the part.

    Raises:
        Untrusted: it is something else.
    """
    known = files.get(f"{manifest.DATA}/{place.file}")
    if known is None or Path(place.file).name != place.file:
        raise _refused(data, f"{name:.200} would be read from {place.file!r:.200}")
    if not place.plain or place.offset + place.length > known.bytes or nbytes > place.length:
        raise _refused(data, f"{name:.200} does not lie in {place.file} as DCP writes it")


def _refused(data: Path, why: str) -> Untrusted:
    return Untrusted(
        f"{data / INDEX} is not what DCP writes: {why}. Nothing was restored: use an older "
        "checkpoint; or, if nobody but you could write to this directory, pass trust=True to the "
        "store, and DCP reads the file itself, running whatever is in it"
    )
