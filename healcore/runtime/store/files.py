"""Files that a crash never leaves half written, and digests by which a changed bit is noticed.

Writing always makes a new file, because a write through a link would change another file. The bytes
go to disk first, then the name, then the directory that holds the name: without the last step a
power cut can undo the name. The same holds for each parent of the run directory. Work in progress
is named `.tmp-healcore-<random>`, so that the next start can remove the files of a killed process.

Digests are xxh3, 128 bits. They detect damage, not malice.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import xxhash
from pydantic import Field

from healcore import regular_file

TEMPORARY = re.compile(r"\.tmp-healcore-[0-9a-f]{16}")
"""Names of work in progress, see `new_temporary`."""
DIFFERS = "is not what this version of healcore has written: its digest differs"
"""End of a message that begins with the name of the file."""
_THREADS = 4
"""More threads make neither disk nor memory faster."""
_MIN_BYTES_FOR_THREADS = 8 << 20
"""Least number of bytes that are worth several threads."""

A = TypeVar("A")
B = TypeVar("B")


def replace(path: Path, data: bytes) -> None:
    """Replaces a file in an existing directory. A crash leaves the old or the new content.

    Args:
        path: path of the file, which may not exist yet.
        data: the new content.

    Raises:
        OSError: the file cannot be written. The old content is unchanged.
    """
    temporary = new_temporary(path.parent)
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def rename(old: Path, new: Path) -> None:
    """Renames a directory within its parent, and waits until the new name is on disk."""
    old.rename(new)
    sync_directory(new.parent)


def sync_directory(path: Path) -> None:
    """Waits until the names in a directory are on disk."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(path: Path) -> None:
    """Makes a directory with its parents, and waits until all their names are on disk.

    Without this wait a power cut can undo the name of the directory, and with it everything that
    was synced below: a run would begin again at step 0, as if it had never saved. If the directory
    exists, the wait is needed too, because the program may have just made it itself.
    """
    path.mkdir(parents=True, exist_ok=True)
    # Also the parents of the folder that a link leads to.
    for parent in {*path.absolute().parents, *path.resolve().parents}:
        with suppress(OSError):  # a directory that this user may not read was there before
            sync_directory(parent)


def discard(path: Path) -> bool:
    """Removes a file or a directory, never through a link. Returns whether that succeeded."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def new_temporary(folder: Path) -> Path:
    """A new path for work in progress in a folder."""
    return folder / f".tmp-healcore-{secrets.token_hex(8)}"


def map_in_threads(action: Callable[[A], B], items: Sequence[A], nbytes: int) -> list[B]:
    """Applies an action to each item, in threads if there is much to do.

    Args:
        action: function that releases the interpreter's lock, such as one that computes digests.
        items: its arguments.
        nbytes: number of bytes that the action works on, in all items together.

    Returns:
        The results, in the order of the items.
    """
    if nbytes < _MIN_BYTES_FOR_THREADS:
        return [*map(action, items)]
    with ThreadPool(_THREADS) as pool:
        return pool.map(action, items)


# -- digests ---------------------------------------------------------------------------------------


class Digest(NamedTuple):
    """The size and digest of a file."""

    bytes: Annotated[int, Field(ge=0, lt=1 << 63)]
    """Size in bytes."""
    xxh3_128: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    """The digest, hexadecimal."""


def digest_of(path: Path, *, sync: bool = False) -> Digest:
    """Computes the digest of a file's content.

    Args:
        path: a regular file, and no link.
        sync: whether to wait until the content is on disk too.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    if path.is_symlink():
        raise OSError(errno.ELOOP, "a link", str(path))
    with open(path, "rb", buffering=0, opener=regular_file.opener) as file:
        state = hashlib.file_digest(file, xxhash.xxh3_128)
        if sync:
            os.fsync(file.fileno())
        return Digest(file.tell(), state.hexdigest())


def sync_and_digest(folder: Path) -> dict[str, Digest]:
    """Waits until all files below a folder are on disk, with their names in folders below it.

    Returns:
        Relative path of each file, with "/" -> its digest, sorted by path.
    """
    found = sorted(folder.rglob("*"))
    folders = [each for each in found if each.is_dir()]
    paths = [each for each in found if each not in folders]
    nbytes = sum(path.stat().st_size for path in paths)
    digests = map_in_threads(partial(digest_of, sync=True), paths, nbytes)
    for each in folders:
        sync_directory(each)
    names = [path.relative_to(folder).as_posix() for path in paths]
    return dict(zip(names, digests, strict=True))


def seal(body: bytes) -> bytes:
    """Adds the digest of a JSON object, as the first value in it.

    Args:
        body: the object, not empty, without a key "digest".
    """
    return _head(body) + body[1:]


def unseal(data: bytes) -> bytes:
    """What `seal` has received. ValueError if a bit has changed, or others wrote the bytes."""
    head = len(_head(b""))
    body = b"{" + data[head:]
    if data[:head] != _head(body):
        raise ValueError(DIFFERS)
    return body


def _head(body: bytes) -> bytes:
    """The beginning of the sealed form of a JSON object, in the place of its bracket."""
    return f'{{"digest":"{xxhash.xxh3_128_hexdigest(body)}",'.encode()
