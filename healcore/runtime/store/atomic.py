"""Writing so that a crash leaves the old or the new, never something between.

The order is that of every careful writer: bytes to disk, then the name, then the directory that
holds the name. Without the last one a power cut can take the name back.
"""

from __future__ import annotations

import os
from pathlib import Path

from healcore.runtime.store import names, regular


def write(path: Path, data: bytes) -> None:
    """Replaces a file whole.

    Args:
        path: the file; its directory exists.
        data: all of its content.
    """
    temporary = path.with_name(names.new_temporary())
    try:
        write_new(temporary, data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        names.done_with(temporary.name)
    sync_directory(path.parent)


def write_new(path: Path, data: bytes) -> None:
    """Writes a file that is not there yet, through no link, and waits until it is on disk."""
    with os.fdopen(regular.create(path), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def rename(old: Path, new: Path) -> None:
    """Gives a directory its final name, durably. `new` must not be there."""
    old.rename(new)
    sync_directory(new.parent)
    if old.parent != new.parent:
        sync_directory(old.parent)


def sync_directory(path: Path) -> None:
    """Waits until the names in a directory are on disk."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
