"""Bringing a checkpoint into a store's directory whole, and taking it out whole."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from healcore.runtime.store import atomic, digest, listing, manifest, names, sweeping
from healcore.runtime.store.digest import Digest
from healcore.runtime.store.errors import SaveFailed
from healcore.runtime.store.ranks import Ranks, agreed, on_first, together, united

_HINTS = {
    errno.ENOSPC: "free some space, or keep fewer checkpoints; what was saved before is untouched",
    errno.EDQUOT: "the quota is used up; what was saved before is untouched",
    errno.EFBIG: "the limit on file sizes is too small for it",
    errno.EROFS: "point the store at a directory that can be written",
    errno.EACCES: "point the store at a directory that can be written",
    errno.ENOENT: "the store's directory has gone: has somebody deleted it?",
}

_ASIDE = 2
"""How many quarantined saves stay after their step was saved again."""


class Written(NamedTuple):
    """What one rank wrote."""

    digests: Mapping[str, Digest]
    """Of files whose bytes were seen on their way to the disk, and which are on it. The others are
    read again."""
    arrays: int
    nonfinite: tuple[str, ...]
    """Names of arrays with NaN or Inf, meant or not."""


class Item(NamedTuple):
    """A checkpoint to be written."""

    step: int
    created: float
    format: str
    healing: bytes | None


def commit(
    root: Path, ranks: Ranks, item: Item, write: Callable[[Path], Written]
) -> tuple[str, ...]:
    """Writes a checkpoint; it is there whole or not at all.

    Args:
        root: the store's directory.
        ranks: every rank calls this.
        item: what it is.
        write: writes state and data below the directory it is given, on every rank.

    Returns:
        Names of the arrays with NaN or Inf, meant or not.

    Raises:
        SaveFailed: on every rank, whichever met the trouble.
    """
    # Everything the ranks do one after another goes through `ranks.gather`, in the same order.
    name = agreed(ranks, names.new_temporary() if ranks.rank == 0 else None)
    folder = root / name
    try:
        on_first(ranks, lambda: folder.mkdir())
        parts = together(ranks, lambda: write(folder))
        on_first(ranks, lambda: _complete(root, folder, item, parts))
        return united(part.nonfinite for part in parts)
    except Exception as error:
        raise SaveFailed(item.step, f"while writing to {root}", error, _hint(error)) from error
    finally:
        if ranks.rank == 0:
            sweeping.discard(folder)  # gone already when all went well
        names.done_with(name)


def clear_superseded(root: Path) -> None:
    """Removes saves whose step was saved again.

    Two kinds stay: the last known-good one, until there is another; and quarantined ones, the
    newest few, because a run that went back soon comes by the same steps again, long before a
    person had the time to look at what went wrong.
    """
    found = listing.complete(root)
    counting = [listing.newest(saves) for saves in found.values()]
    good = any(manifest.read_status(each.folder) == "good" for each in counting)
    aside = []
    for save in (each for saves in found.values() for each in saves):
        status = manifest.read_status(save.folder)
        if save in counting or (status == "good" and not good):
            continue
        if status == "quarantined":
            aside.append(save)
        else:
            remove(root, save.folder)
    aside.sort(key=lambda save: save.manifest.created)
    for save in aside[:-_ASIDE]:
        remove(root, save.folder)


def remove(root: Path, folder: Path) -> None:
    """Takes a checkpoint's name away, in one atomic step, then its files.

    A crash in between leaves a temporary name, which the next start clears.
    """
    name = names.new_temporary()
    try:
        atomic.rename(folder, root / name)
        sweeping.discard(root / name)
    except FileNotFoundError:
        return  # another program was quicker
    finally:
        names.done_with(name)


def _hint(error: BaseException) -> str:
    """What to do about it, where that is known."""
    number = error.errno if isinstance(error, OSError) else None
    # Orbax's writer puts the system's number into the text of a ValueError.
    in_text = re.search(r"os_error_code='(\d+)'", str(error))
    if number is None and in_text:
        number = int(in_text[1])
    return _HINTS.get(number or 0, "")


def _complete(root: Path, folder: Path, item: Item, parts: Sequence[Written]) -> None:
    """The last steps: the digests that are still missing, the manifest, the name."""
    if item.healing is not None:
        atomic.write_new(folder / manifest.HEALING, item.healing)
    paths = digest.files_below(folder)
    known = {path: found for part in parts for path, found in part.digests.items()}
    known.update(_synced(folder, [path for path in paths if path not in known]))
    earlier = listing.complete(root).get(item.step, [])
    record = manifest.new(
        step=item.step,
        created=item.created,
        save=1 + max((each.manifest.save for each in earlier), default=0),
        format=item.format,
        files={path: known[path] for path in paths},
        arrays=max(part.arrays for part in parts),
        nonfinite=united(part.nonfinite for part in parts),
        healing=item.healing is not None,
    )
    resized = manifest.missing_or_resized(folder, record)
    if resized is not None:
        raise OSError(errno.EIO, f"{resized[0]} {resized[1]}")
    manifest.write(folder, record)
    atomic.sync_directory(folder)
    # Only now does it have the name of a checkpoint.
    atomic.rename(folder, root / names.step_directory(item.step))
    clear_superseded(root)


def _synced(folder: Path, files: Sequence[str]) -> dict[str, Digest]:
    """Digests of some files; they and all directories are on disk then.

    At the same time, as far as it goes: file systems wait once for many who wait together.
    """
    with ThreadPoolExecutor(digest.threads()) as pool:
        found = pool.map(lambda path: digest.file_digest(folder / path, sync=True), files)
        synced = pool.map(atomic.sync_directory, [Path(at) for at, _, _ in os.walk(folder)])
        list(synced)
        return dict(zip(files, found, strict=True))
