"""Writes files in a run directory so that a crash leaves no partial file.

Writing always makes a new file, because a write through a link would change another file. The bytes
go to disk first, then the name, then the directory that holds the name: without the last step a
power cut can undo the name.

Work in progress is named `.tmp-healcore-<random>`, so that the next start can remove the files of a
killed process.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

NO_LINK = getattr(os, "O_NOFOLLOW", 0)
NO_WAITING = getattr(os, "O_NONBLOCK", 0)
_CLOSED_IN_CHILDREN = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

_TEMPORARY = re.compile(r"\.tmp-healcore-[0-9a-f]{16}")


def create(path: str | os.PathLike[str], flags: int = os.O_WRONLY) -> int:
    """Creates and opens a file, never an existing file or a link. Also an `opener` for `open`."""
    del flags
    exclusive = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK
    return os.open(path, exclusive | _CLOSED_IN_CHILDREN, 0o666)


def replace(path: Path, data: bytes) -> None:
    """Replaces a file in an existing directory. A crash leaves the old or the new content."""
    temporary = path.with_name(new_temporary())
    try:
        write_new(temporary, data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_new(path: Path, data: bytes) -> None:
    """Writes a new file and waits until it is on disk."""
    with os.fdopen(create(path), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def rename(old: Path, new: Path) -> None:
    """Renames a directory, durably. `new` must not exist."""
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


def list_below(folder: Path) -> list[str]:
    """Every file below a folder as sorted relative paths with forward slashes."""
    return sorted(
        (Path(parent) / name).relative_to(folder).as_posix()
        for parent, _, names in os.walk(folder)
        for name in names
    )


def new_temporary() -> str:
    """A new name for work in progress."""
    return f".tmp-healcore-{secrets.token_hex(8)}"


def is_temporary(name: str) -> bool:
    """Whether a name is a name for work in progress."""
    return _TEMPORARY.fullmatch(name) is not None
