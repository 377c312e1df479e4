"""Writes files in a run directory so that a crash leaves no partial file.

Writing always makes a new file, because a write through a link would change another file. The bytes
go to disk first, then the name, then the directory that holds the name: without the last step a
power cut can undo the name. The same holds for each parent of the run directory. Work in progress
is named `.tmp-healcore-<random>`, so that the next start can remove the files of a killed process.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TypeVar

from healcore.runtime.store.checksums import Digest, digest_of

_MIN_BYTES_FOR_THREADS = 8 << 20
"""Least number of bytes that are worth several threads."""
TEMPORARY = re.compile(r"\.tmp-healcore-[0-9a-f]{16}")
"""Names of work in progress, see `new_temporary`."""

A = TypeVar("A")
B = TypeVar("B")


def write_new(path: Path, data: bytes) -> None:
    """Writes a new file, and waits until its content is on disk.

    Args:
        path: path of the file, which must not exist, not even as a link.
        data: its content.

    Raises:
        OSError: the file exists, or cannot be written.
    """
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: bytes) -> None:
    """Replaces a file in an existing directory. A crash leaves the old or the new content.

    Args:
        path: path of the file, which may not exist yet.
        data: the new content.

    Raises:
        OSError: the file cannot be written. The old content is unchanged.
    """
    temporary = path.with_name(new_temporary())
    try:
        write_new(temporary, data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def rename(old: Path, new: Path) -> None:
    """Renames a directory within its parent, and waits until the new name is on disk.

    Args:
        old: the directory, whose content is on disk already.
        new: its new path, which must not exist.
    """
    old.rename(new)
    sync_directory(new.parent)


def sync_directory(path: Path) -> None:
    """Waits until the names in a directory are on disk.

    A file whose content is on disk is lost if its name is not.
    """
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


def entries_of(folder: Path) -> list[Path]:
    """The sorted entries of a directory.

    Returns:
        Paths, or an empty list if the directory cannot be read. So use it only for work that can be
        left undone, such as a cleanup.
    """
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def new_temporary() -> str:
    """A new name for work in progress."""
    return f".tmp-healcore-{secrets.token_hex(8)}"


def sync_and_digest(folder: Path) -> dict[str, Digest]:
    """Waits until all files below a folder are on disk, with their names.

    Returns:
        Relative path of each file, with "/" -> its digest, sorted by path.
    """
    folders: list[Path] = []
    paths: list[str] = []
    for parent, _, names in os.walk(folder):
        folders.append(Path(parent))
        for name in names:
            path = Path(parent) / name
            paths.append(path.relative_to(folder).as_posix())
    paths.sort()
    # Concurrently: a file system flushes simultaneous requests together.
    with ThreadPoolExecutor(threads()) as pool:
        digests = pool.map(lambda path: digest_of(folder / path, sync=True), paths)
        list(pool.map(sync_directory, folders))
        return dict(zip(paths, digests, strict=True))


def map_in_threads(action: Callable[[A], B], items: Iterable[A], nbytes: int) -> list[B]:
    """Applies an action to each item, in threads if there is much to do.

    Args:
        action: function that releases the interpreter's lock, such as one that computes digests.
        items: its arguments.
        nbytes: number of bytes that the action works on, in all items together.

    Returns:
        The results, in no particular order.
    """
    items = list(items)
    workers = 1
    if nbytes >= _MIN_BYTES_FOR_THREADS:
        workers = threads()
    if workers == 1:
        return list(map(action, items))

    def apply_to_share(first: int) -> list[B]:
        # Not one task per item: submitting a task takes as long as a small item.
        return list(map(action, items[first::workers]))

    with ThreadPoolExecutor(workers) as pool:
        return list(chain.from_iterable(pool.map(apply_to_share, range(workers))))


def threads() -> int:
    """Number of threads to read with, at most four: more make neither disk nor memory faster."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, min(4, cores))
