"""DCP's own writer, with every file's digest taken on the way to the disk."""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from healcore.runtime.store import regular
from healcore.runtime.store.digest import Digest

_BUFFER = 1 << 18
"""Bytes. torch.save writes some forty small pieces around every tensor."""
_LARGE = 1 << 20
"""Bytes from which on a piece is digested by a second thread while the first one writes it."""


class DigestingWriter(FileSystemWriter):
    """A FileSystemWriter that knows the digests of the files it wrote.

    They are of the bytes as they were handed to the system: what the disk makes of them afterwards
    is noticed by the next `verify`, and no byte is read again to get them.

    Args:
        path: a directory; new.
        threads: files written at the same time.
    """

    def __init__(self, path: Path, threads: int = 1) -> None:
        # Not sync_files: it syncs before Python's buffer is flushed. Ours does it on closing.
        super().__init__(path, sync_files=False, thread_count=threads)
        self.fs = self._files = _DigestingFiles()

    @property
    def digests(self) -> dict[str, Digest]:
        """File name -> digest, of the files of this rank."""
        return {Path(path).name: found for path, found in self._files.digests.items()}


class _DigestingFiles(FileSystem):
    """Local files; writing through it is remembered."""

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
            open(path, "xb", buffering=_BUFFER, opener=regular.create) as file,
        ):
            through = _Through(file, pool)
            try:
                yield through
            except Exception as error:
                # torch covers up what the system said ("unexpected pos"): say that instead.
                raise through.error or error from error
            file.flush()
            os.fsync(file.fileno())
        self.digests[os.fspath(path)] = Digest(through.size, through.digest.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        if os.fspath(path) in self.digests:
            self.digests[os.fspath(new_path)] = self.digests.pop(os.fspath(path))


class _Through(io.RawIOBase):
    """Counts and digests what is written."""

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
        if len(view) < _LARGE:
            self.digest.update(view)
        else:
            digested = self._pool.submit(self.digest.update, view)
        try:
            self._file.write(view)
        except OSError as error:
            self.error = error
            raise
        finally:
            # The memory is the caller's again afterwards.
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
