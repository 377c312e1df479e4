"""Adds checkpoints to a store's directory and removes them, each in one atomic step."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import healcore
from healcore.runtime.store import files, inspection, manifest
from healcore.runtime.store.copies import StateCopy
from healcore.runtime.store.errors import SaveFailed
from healcore.runtime.store.inspection import Digest
from healcore.runtime.store.ranks import Ranks, agreed, on_each, on_first


def commit(
    root: Path,
    ranks: Ranks,
    copy: StateCopy,
    format: str,
    write: Callable[[Path], None],
    join: Callable[[Path], None],
) -> Path:
    """Writes a checkpoint atomically. Every rank calls it.

    Every rank calls `write` with the directory to write state and data. Then rank 0 calls `join`
    with the directory. Returns the final directory. If one rank fails, all ranks raise SaveFailed.
    """
    # All exchanges of the ranks go through `ranks.gather`, in the same order.
    folder = root / agreed(ranks, files.new_temporary())
    try:
        on_first(ranks, lambda: folder.mkdir())
        on_each(ranks, lambda: write(folder))
        return on_first(ranks, lambda: (join(folder), _complete(root, folder, copy, format))[1])
    except Exception as error:
        raise SaveFailed(copy.step, f"while writing to {root}", error) from error
    finally:
        if ranks.rank == 0:
            files.discard(folder)  # after a success the folder has its final name


def remove(folder: Path) -> None:
    """Renames a checkpoint to a temporary name, atomically, then deletes its files."""
    temporary = folder.with_name(files.new_temporary())
    try:
        files.rename(folder, temporary)
    except FileNotFoundError:
        return  # another program has removed it
    files.discard(temporary)


def sweep(root: Path) -> list[str]:
    """Removes the temporary files of killed processes; returns their names.

    The caller has claimed the directory, and nothing is being written.
    """
    folders = [root, *(path for path in _entries(root) if manifest.step_of(path) is not None)]
    return [
        path.relative_to(root).as_posix()
        for folder in folders
        for path in _entries(folder)
        if files.is_temporary(path.name) and files.discard(path)
    ]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _complete(root: Path, folder: Path, copy: StateCopy, format: str) -> Path:
    """Completes a save: computes the digests, writes the manifest, sets the final name."""
    paths = files.list_below(folder)
    digests = _sync_and_digest(folder, paths)
    record = manifest.Manifest(
        step=copy.step,
        created=copy.created,
        attempt=copy.attempt,
        writer=f"healcore {healcore.__version__}",
        format=format,
        files=digests,
        nonfinite=copy.nonfinite,
        healing=copy.healing is not None,
    )
    if copy.healing is not None:
        files.write_new(folder / manifest.HEALING, copy.healing)
    manifest.write(folder, record)
    files.sync_directory(folder)
    final = root / manifest.step_directory(copy.step, copy.attempt)
    same_step = [each for each in _entries(root) if manifest.step_of(each) == copy.step]
    if final.exists():
        remove(final)
    # A directory with this name is a complete checkpoint.
    files.rename(folder, final)
    for each in same_step:
        if each != final:
            remove(each)
    return final


def _sync_and_digest(folder: Path, paths: Sequence[str]) -> dict[str, Digest]:
    """Waits until some files and all directories are on disk; returns the files' digests."""
    # Concurrently: a file system flushes simultaneous requests together.
    with ThreadPoolExecutor(inspection.threads()) as pool:
        digests = pool.map(lambda path: inspection.file_digest(folder / path, sync=True), paths)
        synced = pool.map(files.sync_directory, [Path(inner) for inner, _, _ in os.walk(folder)])
        list(synced)
        return dict(zip(paths, digests, strict=True))
