"""How a checkpoint enters a store's directory and leaves it: whole, in one atomic step."""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import healcore
from healcore.runtime.store import files, inspection, manifest
from healcore.runtime.store.copies import StateCopy
from healcore.runtime.store.errors import SaveFailed
from healcore.runtime.store.inspection import Digest
from healcore.runtime.store.ranks import Ranks, agreed, on_first, together, united

_UNTOUCHED = "what was saved before is untouched"
_READ_ONLY = "point the store at a directory that can be written"
_HINTS = {
    errno.ENOSPC: f"free some space, or keep fewer checkpoints; {_UNTOUCHED}",
    errno.EDQUOT: f"the quota is used up; {_UNTOUCHED}",
    errno.EFBIG: "the limit on file sizes is too small for it",
    errno.EROFS: _READ_ONLY,
    errno.EACCES: _READ_ONLY,
    errno.ENOENT: "the store's directory has gone: has somebody deleted it?",
}

_SAFE_AGE_S = 3600.0
"""Seconds without a change after which no process works on a file any more."""


class Written(NamedTuple):
    """What one rank wrote."""

    digests: Mapping[str, Digest]
    """Digests that were computed during the write, of files on disk. Other files are read again."""
    arrays: int
    nonfinite: tuple[str, ...]
    """Names of arrays with NaN or Inf, allowed or not."""


def commit(
    root: Path,
    ranks: Ranks,
    copy: StateCopy,
    format: str,
    write: Callable[[Path], Written],
    join: Callable[[Path], None],
) -> tuple[str, ...]:
    """Writes a checkpoint, whole or not at all; every rank calls it.

    `write` puts state and data below the directory that it is given. Afterwards rank 0 calls `join`
    with the directory. Returns the names of the arrays with NaN or Inf, allowed or not. If one rank
    fails, all raise SaveFailed.
    """
    # All exchanges of the ranks go through `ranks.gather`, in the same order.
    name = agreed(ranks, files.new_temporary() if ranks.rank == 0 else None)
    folder = root / name
    try:
        on_first(ranks, lambda: folder.mkdir())
        parts = together(ranks, lambda: write(folder))
        on_first(ranks, lambda: (join(folder), _complete(root, folder, copy, format, parts)))
        return united(part.nonfinite for part in parts)
    except Exception as error:
        raise SaveFailed(copy.step, f"while writing to {root}", error, _hint(error)) from error
    finally:
        if ranks.rank == 0:
            files.discard(folder)  # after a success it has gone already
        files.end_temporary(name)


def clear_superseded(root: Path) -> None:
    """Removes saves whose step was saved again; the last known-good save stays."""
    found = manifest.complete(root)
    counting = [manifest.newest(saves) for saves in found.values()]
    good = any(manifest.read_status(each.folder) == "good" for each in counting)
    for save in (each for saves in found.values() for each in saves):
        last_good = not good and manifest.read_status(save.folder) == "good"
        if save not in counting and not last_good:
            remove(root, save.folder)


def remove(root: Path, folder: Path) -> None:
    """Takes a checkpoint's name away, in one atomic step, then deletes its files."""
    name = files.new_temporary()
    try:
        files.rename(folder, root / name)
        files.discard(root / name)
    except FileNotFoundError:
        return  # another program was faster
    finally:
        files.end_temporary(name)


def sweep(root: Path, *, sole_since: float | None = None) -> list[str]:
    """Removes the stale temporary files of killed processes; returns their names.

    Processes of other machines and containers cannot be seen. Their files are removed only by a run
    that has locked the directory, and only if nothing in them has changed for an hour.

    Args:
        root: the store's directory.
        sole_since: when the run has locked the directory, in seconds by the clock of its disk, or
            None if the directory may be in use by another run.
    """

    def stale(path: Path) -> bool:
        if files.is_abandoned(path.name):
            return True
        if sole_since is None or files.is_of_this_place(path.name):
            return False
        return _last_change(path) < sole_since - _SAFE_AGE_S

    folders = [root, *(each for each in _listed(root) if manifest.step_of(each) is not None)]
    return [
        path.relative_to(root).as_posix()
        for folder in folders
        for path in _listed(folder)
        if files.is_temporary(path.name) and stale(path) and files.discard(path)
    ]


def _last_change(path: Path) -> float:
    """The newest time of a change in a file or directory, or infinity if it cannot be read."""
    try:
        return max(each.lstat().st_mtime for each in (path, *path.rglob("*")))
    except OSError:
        return math.inf


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _hint(error: BaseException) -> str:
    number = error.errno if isinstance(error, OSError) else None
    # Orbax's writer puts the system's number into the text of a ValueError.
    in_text = re.search(r"os_error_code='(\d+)'", str(error))
    if number is None and in_text:
        number = int(in_text[1])
    return _HINTS.get(number or 0, "")


def _complete(
    root: Path, folder: Path, copy: StateCopy, format: str, parts: Sequence[Written]
) -> None:
    """The last steps of a save: the missing digests, the manifest, the final name."""
    if copy.healing is not None:
        files.write_new(folder / manifest.HEALING, copy.healing)
    paths = files.below(folder)
    known = {path: found for part in parts for path, found in part.digests.items()}
    known.update(_synced(folder, [path for path in paths if path not in known]))
    earlier = manifest.complete(root).get(copy.step, [])
    bad = united(part.nonfinite for part in parts)
    record = manifest.Manifest(
        step=copy.step,
        created=copy.created,
        save=1 + max((each.manifest.save for each in earlier), default=0),
        writer=f"healcore {healcore.__version__}",
        format=format,
        files={path: known[path] for path in paths},
        arrays=max(part.arrays for part in parts),
        nonfinite=bad[: manifest.NAMES_KEPT],
        healing=copy.healing is not None,
        unnamed=max(0, len(bad) - manifest.NAMES_KEPT),
    )
    resized = manifest.missing_or_resized(folder, record)
    if resized is not None:
        raise OSError(errno.EIO, f"{resized.file} {resized.difference}")
    manifest.write(folder, record)
    files.sync_directory(folder)
    # Only now does it have the name of a checkpoint.
    files.rename(folder, root / manifest.step_directory(copy.step))
    clear_superseded(root)


def _synced(folder: Path, paths: Sequence[str]) -> dict[str, Digest]:
    """Digests of some files. They and all directories are on disk when it returns."""
    # Concurrently: file systems wait once for many who wait together.
    with ThreadPoolExecutor(inspection.threads()) as pool:
        found = pool.map(lambda path: inspection.file_digest(folder / path, sync=True), paths)
        synced = pool.map(files.sync_directory, [Path(at) for at, _, _ in os.walk(folder)])
        list(synced)
        return dict(zip(paths, found, strict=True))
