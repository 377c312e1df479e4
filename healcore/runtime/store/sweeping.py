"""Cleaning up after processes that were killed: own leavings only.

A name is removed if it has the shape that this package gives to work in progress, and its process
is gone. Everything else, whatever it looks like, is somebody's and stays.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from healcore.runtime.store import names


def sweep(root: Path) -> list[str]:
    """Removes abandoned work in a store's directory.

    Args:
        root: the store's directory.

    Returns:
        Names that were removed. What cannot be removed (a read-only disk) stays without a word: it
        is in nobody's way.
    """
    removed = []
    for path in _temporaries(root):
        if names.is_abandoned(path.name) and discard(path):
            removed.append(path.relative_to(root).as_posix())
    return removed


def discard(path: Path) -> bool:
    """Removes a file or a directory with all in it, never through a link. Whether it is gone."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _temporaries(root: Path) -> Iterator[Path]:
    """Work in progress in a store and in its checkpoints."""
    for path in _listed(root):
        if names.is_temporary(path.name):
            yield path
        elif names.parse_step(path.name) is not None:
            yield from (inner for inner in _listed(path) if names.is_temporary(inner.name))


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
