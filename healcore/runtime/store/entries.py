"""The files with the structure and the Python values of a checkpoint's state."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from healcore import regular_file
from healcore.runtime.store import files, structure
from healcore.runtime.store.errors import StoreError
from healcore.runtime.store.inspection import digest_of
from healcore.runtime.store.manifest import DIFFERS, STATE, StoredCheckpoint

_CRAFTED = (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError)
"""Errors that reading raises if another program wrote a file with the right digest."""


def write(folder: Path, entries: Mapping[str, Mapping[str, Any]], rank: int) -> None:
    """Writes the per-rank entries of this rank, and on rank 0 also the shared entries."""
    own = {name: entry for name, entry in entries.items() if entry.get("per_rank")}
    if own:
        files.write_new(folder / _rank_file(rank), structure.dumps(own))
    if rank == 0:
        shared = {name: entry for name, entry in entries.items() if name not in own}
        files.write_new(folder / STATE, structure.dumps(shared))


def read(checkpoint: StoredCheckpoint, rank: int) -> dict[str, Any]:
    """The entries for this rank; CheckpointDamaged if a digest differs."""

    def content(name: str) -> dict[str, Any]:
        try:
            data = regular_file.read(checkpoint.folder / name)
        except OSError as error:
            raise checkpoint.damaged(name, f"cannot be read ({error.strerror})") from error
        if digest_of(data) != checkpoint.manifest.files[name]:
            raise checkpoint.damaged(name, DIFFERS)
        return {**json.loads(data)}

    own = _rank_file(rank)
    return content(STATE) | (content(own) if own in checkpoint.manifest.files else {})


@contextmanager
def only_written_by_healcore(checkpoint: StoredCheckpoint) -> Iterator[None]:
    """Raises CheckpointDamaged for content with the right digests that no store has written."""
    try:
        yield
    except StoreError:
        raise
    except _CRAFTED as error:
        why = f"holds a state that healcore does not write ({type(error).__name__}: {error!s:.200})"
        raise checkpoint.damaged(STATE, why) from error


def _rank_file(rank: int) -> str:
    return f"state-rank-{rank:05d}.json"
