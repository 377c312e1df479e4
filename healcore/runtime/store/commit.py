"""Adds checkpoints to a store's directory and removes them, each in one atomic step."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import healcore
from healcore.runtime.store import files, inspection, manifest
from healcore.runtime.store.claim import LOCK, claim
from healcore.runtime.store.copies import StateCopy
from healcore.runtime.store.errors import SaveFailed, StoreError
from healcore.runtime.store.inspection import Digest
from healcore.runtime.store.ranks import Ranks, agreed, on_first, together, union_of_names

_UNTOUCHED = "earlier checkpoints are unchanged"
_READ_ONLY = "point the store at a directory that can be written"
_HINTS = {
    errno.ENOSPC: f"free some space, or keep fewer checkpoints; {_UNTOUCHED}",
    errno.EDQUOT: f"the quota is used up; {_UNTOUCHED}",
    errno.EFBIG: "the limit on file sizes is too small for this checkpoint",
    errno.EROFS: _READ_ONLY,
    errno.EACCES: _READ_ONLY,
    errno.ENOENT: "the store's directory does not exist: has it been deleted?",
}


class RankPart(NamedTuple):
    """The part of a checkpoint that one rank has written."""

    array_count: int
    nonfinite: tuple[str, ...]
    """Names of arrays with NaN or Inf, allowed or not."""


def commit(
    root: Path,
    ranks: Ranks,
    copy: StateCopy,
    format: str,
    write: Callable[[Path], RankPart],
    join: Callable[[Path], None],
) -> tuple[str, ...]:
    """Writes a checkpoint atomically. Every rank calls it.

    Every rank calls `write` with the directory to write state and data. Then rank 0 calls `join`
    with the directory. Returns the names of the arrays with NaN or Inf, allowed or not. If one
    rank fails, all ranks raise SaveFailed.
    """
    # All exchanges of the ranks go through `ranks.gather`, in the same order.
    name = agreed(ranks, files.new_temporary() if ranks.rank == 0 else None)
    folder = root / name
    try:
        on_first(ranks, lambda: folder.mkdir())
        parts = together(ranks, lambda: write(folder))
        on_first(ranks, lambda: (join(folder), _complete(root, folder, copy, format, parts)))
        return union_of_names(part.nonfinite for part in parts)
    except Exception as error:
        raise SaveFailed(copy.step, f"while writing to {root}", error, _hint(error)) from error
    finally:
        if ranks.rank == 0:
            files.discard(folder)  # after a success the folder has its final name
        files.end_temporary(name)


def remove(root: Path, folder: Path) -> None:
    """Renames a checkpoint to a temporary name, atomically, then deletes its files."""
    name = files.new_temporary()
    try:
        files.rename(folder, root / name)
        files.discard(root / name)
    except FileNotFoundError:
        return  # another program has removed it
    finally:
        files.end_temporary(name)


def sweep(root: Path, *, claimed: bool = False) -> list[str]:
    """Removes the temporary files of killed processes; returns their names.

    Does nothing if another run has claimed the directory. `claimed` is whether the caller has.
    """
    try:
        held = None if claimed or not (root / LOCK).exists() else claim(root)
    except StoreError:
        return []
    folders = [root, *(path for path in _entries(root) if manifest.step_of(path) is not None)]
    swept = [
        path.relative_to(root).as_posix()
        for folder in folders
        for path in _entries(folder)
        if files.is_abandoned(path.name) and files.discard(path)
    ]
    if held is not None:
        held.release()
    return swept


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _hint(error: BaseException | None) -> str:
    while error is not None:
        # TensorStore raises a ValueError with the error number in its text; torch raises errors of
        # its own while it handles the system's error.
        in_text = re.search(r"os_error_code='(\d+)'", str(error))
        number = int(in_text[1]) if in_text else getattr(error, "errno", None)
        if number in _HINTS:
            return _HINTS[number]
        error = error.__cause__ or error.__context__
    return ""


def _complete(
    root: Path, folder: Path, copy: StateCopy, format: str, parts: Sequence[RankPart]
) -> None:
    """Completes a save: computes the digests, writes the manifest, sets the final name."""
    paths = files.list_below(folder)
    digests = _sync_and_digest(folder, paths)
    nonfinite = union_of_names(part.nonfinite for part in parts)
    record = manifest.Manifest(
        step=copy.step,
        created=copy.created,
        attempt=copy.attempt,
        writer=f"healcore {healcore.__version__}",
        format=format,
        files=digests,
        arrays=max(part.array_count for part in parts),
        nonfinite=nonfinite[: manifest.MAX_NAMES],
        healing=copy.healing is not None,
        unnamed=max(0, len(nonfinite) - manifest.MAX_NAMES),
    )
    if copy.healing is not None:
        files.write_new(folder / manifest.HEALING, copy.healing)
    manifest.write(folder, record)
    files.sync_directory(folder)
    final = root / manifest.step_directory(copy.step, copy.attempt)
    same_step = [each for each in _entries(root) if manifest.step_of(each) == copy.step]
    if final.exists():
        remove(root, final)
    # A directory with this name is a complete checkpoint.
    files.rename(folder, final)
    for each in same_step:
        if each != final:
            remove(root, each)


def _sync_and_digest(folder: Path, paths: Sequence[str]) -> dict[str, Digest]:
    """Waits until some files and all directories are on disk; returns the files' digests."""
    # Concurrently: a file system flushes simultaneous requests together.
    with ThreadPoolExecutor(inspection.threads()) as pool:
        digests = pool.map(lambda path: inspection.file_digest(folder / path, sync=True), paths)
        synced = pool.map(files.sync_directory, [Path(inner) for inner, _, _ in os.walk(folder)])
        list(synced)
        return dict(zip(paths, digests, strict=True))
