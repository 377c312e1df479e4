"""Who else can write to a run directory. Digests lie beside the files and tell nothing of that."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def open_to_others(root: Path) -> str | None:
    """What a person should know, in words; None if only this user (and root) can write there.

    Looks at the directory and at what lies in it, not deeper: owners and mode bits. Access lists,
    and who can write to the directories above, are not seen.

    Args:
        root: the store's directory.
    """
    if not hasattr(os, "geteuid"):
        return None
    try:
        found = [(root, root.stat())]
        with os.scandir(root) as entries:
            found += [(Path(entry), entry.stat(follow_symlinks=False)) for entry in entries]
    except OSError:
        return None  # told where it is needed
    told = [(path, why) for path, status in found if (why := _why(status)) is not None]
    if not told:
        return None
    path, why = told[0]
    more = f", and so for {len(told) - 1} more in it" if len(told) > 1 else ""
    return (
        f"{path} {why}{more}: whoever can write there can change what this run goes on from, and "
        f"no digest tells that. If it is to be yours alone: chmod go-w {root}, and chown"
    )


def _why(status: os.stat_result) -> str | None:
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}"
    if stat.S_ISLNK(status.st_mode) or not status.st_mode & 0o022:
        return None
    who = "everybody" if status.st_mode & stat.S_IWOTH else "its group"
    return f"can be written by {who} (mode {stat.S_IMODE(status.st_mode):o})"
