"""The writer of torch.distributed.checkpoint (DCP) with digests, its reader with a checked index.

DCP pickles its index. This module reads the index as data, and checks it for DCP.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from healcore.runtime.store import files, manifest
from healcore.runtime.store.errors import Untrusted
from healcore.runtime.store.inspection import Digest
from healcore.torch import dcp_index
from healcore.torch.dcp_index import INDEX, Place, Shape
from healcore.torch.plain_values import DTYPES

_BUFFER = 1 << 18
"""Bytes of the write buffer. torch.save writes about forty small pieces around every tensor."""
_MIN_CONCURRENT = 1 << 20
"""Minimum bytes of a piece that a second thread digests while the first thread writes it."""


class DigestingWriter(FileSystemWriter):
    """A FileSystemWriter that computes digests while it writes.

    So no byte is read again for a digest. The next `verify` detects bytes that the disk changed.
    """

    def __init__(self, path: Path) -> None:
        # `sync_files` would sync before Python's buffer is flushed, so _DigestingFiles syncs.
        super().__init__(path, sync_files=False, thread_count=1)
        self.fs = self._files = _DigestingFiles()

    @property
    def digests(self) -> dict[str, Digest]:
        """File name -> digest, for the files of this rank."""
        return {Path(path).name: digest for path, digest in self._files.digests.items()}


class _DigestingFiles(FileSystem):
    """Local files. Records the digests of files that it writes."""

    def __init__(self) -> None:
        self.digests: dict[str, Digest] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with (
            ThreadPoolExecutor(1) as pool,
            open(path, "xb", buffering=_BUFFER, opener=files.create) as file,
        ):
            stream = _DigestingStream(file, pool)
            try:
                yield stream
            except Exception as error:
                # torch replaces the system's error by its own ("unexpected pos").
                raise stream.error or error from error
            file.flush()
            os.fsync(file.fileno())
        self.digests[os.fspath(path)] = Digest(stream.size, stream.digest.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        if os.fspath(path) in self.digests:
            self.digests[os.fspath(new_path)] = self.digests.pop(os.fspath(path))


class _DigestingStream(io.RawIOBase):
    """Counts and digests the bytes that it writes to a file."""

    def __init__(self, file: BinaryIO, pool: ThreadPoolExecutor) -> None:
        super().__init__()
        self.digest = xxhash.xxh3_128()
        self.size = 0
        self.error: OSError | None = None
        self._file = file
        self._pool = pool

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        digested = None
        if len(view) < _MIN_CONCURRENT:
            self.digest.update(view)
        else:
            digested = self._pool.submit(self.digest.update, view)
        try:
            self._file.write(view)
        except OSError as error:
            self.error = error
            raise
        finally:
            # The caller may change the memory afterwards.
            if digested is not None:
                digested.result()
        self.size += len(view)
        return len(view)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()


class CheckedReader(FileSystemReader):
    """DCP's reader with an index that `check_index` has returned."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the index without opening its file."""
        del args, kwargs
        return self._metadata


def check_index(
    data: Path, listed: Mapping[str, Digest], wanted: Mapping[str, tuple[str, Shape]]
) -> Metadata:
    """Reads the index of DCP without pickle. Returns the part for some tensors, in DCP's classes.

    Args:
        data: directory of DCP's files.
        listed: path -> digest of the verified files in the manifest.
        wanted: name -> required dtype and shape of a tensor.

    Raises:
        Untrusted: a tensor is missing or differs, or the index is not as DCP writes it.
    """
    try:
        entries = dcp_index.read(data / INDEX)
    except OSError as error:
        raise _untrusted(data, f"it cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise _untrusted(data, str(error)) from None
    metadata: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for name, (dtype, shape) in wanted.items():
        entry = entries.get(name)
        if entry is None or not entry.dtype:
            raise _untrusted(data, f"it has no tensor {name:.200}")
        if (entry.dtype, entry.shape) != (dtype, shape):
            actual = f"{entry.dtype}{list(entry.shape)}"
            raise _untrusted(data, f"{name:.200} is {actual:.200}, not {dtype}{list(shape)}")
        if sum(math.prod(sizes) for _, sizes in entry.chunks) != math.prod(shape):
            raise _untrusted(data, f"the parts of {name:.200} do not add up to its shape")
        kind = DTYPES[dtype]
        chunks = []
        for number, (offsets, sizes) in enumerate(entry.chunks):
            place = entry.places.get(offsets)
            if place is None or not _fits(offsets, sizes, shape):
                raise _untrusted(data, f"a part of {name:.200} is missing or outside of its shape")
            nbytes = kind.itemsize * math.prod(sizes)
            _check_place(data, listed, name, place, nbytes)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            index = MetadataIndex(name, torch.Size(offsets), number)
            storage[index] = _StorageInfo(place.file, place.offset, place.length)
        metadata[name] = TensorStorageMetadata(TensorProperties(kind), torch.Size(shape), chunks)
    return Metadata(metadata, storage_data=storage, storage_meta=StorageMeta())


def _fits(offsets: Shape, sizes: Shape, shape: Shape) -> bool:
    return len(offsets) == len(sizes) == len(shape) and all(
        start + size <= whole for start, size, whole in zip(offsets, sizes, shape, strict=True)
    )


def _check_place(
    data: Path, listed: Mapping[str, Digest], name: str, place: Place, nbytes: int
) -> None:
    """Raises Untrusted unless a part is within a listed file next to the index."""
    known = listed.get(f"{manifest.DATA}/{place.file}")
    if known is None or Path(place.file).name != place.file:
        raise _untrusted(data, f"{name:.200} is in the unlisted file {place.file!r:.200}")
    if not place.plain or place.offset + place.length > known.bytes or nbytes > place.length:
        raise _untrusted(data, f"{name:.200} is not in {place.file} as DCP writes it")


def _untrusted(data: Path, why: str) -> Untrusted:
    return Untrusted(
        f"{data / INDEX} is not what DCP writes: {why}. Nothing was restored: use an older "
        "checkpoint"
    )
