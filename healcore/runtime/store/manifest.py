"""The directories of checkpoints: written, listed, verified and removed.

    root/
      step-0000000120.1/               step and attempt of the save
        data/                          arrays, in the files of the framework, or in a small file
        state.json                     structure of the state, Python values
        manifest.json                  size and digest of all files above
        healing.json                   the record, if one was saved; a rollback replaces it
      .tmp-healcore-…/                 work in progress: a save, or a checkpoint being deleted

Each change of a directory takes effect by one rename, its commit. A crash before the commit leaves
the old state, and a crash after the commit leaves the new state:

    save      write the files, then the manifest, into .tmp-healcore-…
              rename it to step-….1                                          <- commit
    rollback  write the new record to a temporary file
              rename the file to healing.json                                <- commit
    deletion  rename step-….1 to .tmp-healcore-…                             <- commit
              delete the files

What is renamed is on disk before, see `files`. A manifest is never changed. A directory without a
valid manifest is no checkpoint. Nothing is cached: each function reads the disk.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError

import healcore
from healcore import regular_file
from healcore.runtime.store import files
from healcore.runtime.store.array_format import HostCopy
from healcore.runtime.store.checkpoints import (
    AttemptHistory,
    CheckpointDamaged,
    CheckpointInfo,
    StoreError,
)
from healcore.runtime.store.files import Digest

SCHEMA = 5
"""Version of the manifest. A manifest of another version is not read."""
MANIFEST = "manifest.json"
STATE = "state.json"
RECORD = "healing.json"
DATA = "data"
"""Directory of the arrays."""
_STEP = re.compile(r"step-(\d{10,})\.[0-9a-f]{1,18}")
"""Other versions of healcore had a random suffix."""
CRAFTED = (
    LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError,
    SafetensorError,
)  # fmt: skip
"""Errors that reading raises if another program wrote a file with the right digest."""


_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class Manifest(NamedTuple):
    """What is read of a manifest. Digests are no signature: anybody may have written the file."""

    step: _Count
    """Number of optimizer steps that the state has had."""
    created: Annotated[float, Field(gt=-(1 << 40), lt=1 << 40)]
    """Wall-clock seconds since 1970."""
    attempt: Annotated[_Count, Field(ge=1)]
    """Number of the attempt that saved the checkpoint, from 1. See `AttemptHistory`."""
    files: Annotated[dict[str, Digest], Field(min_length=1)]
    """Relative path -> size and digest, for every file except the manifest and the record."""
    nonfinite: tuple[str, ...]
    """Names of arrays with NaN or Inf, allowed or not."""
    healing: bool
    """Whether the checkpoint has a record, in `healing.json`."""

    @property
    def nbytes(self) -> int:
        """Size of all files in bytes."""
        return sum(digest.bytes for digest in self.files.values())


_MANIFEST = TypeAdapter(Manifest)


class StoredCheckpoint(NamedTuple):
    """A complete checkpoint on disk: the digests of manifest and record are right.

    That the content of the files is right is checked before a restore, by `find_damage`.
    """

    folder: Path
    """Directory of the checkpoint."""
    manifest: Manifest
    """Step, attempt, and the digests of its files."""
    record: dict[str, Any] | None
    """The record of the run, or None if the checkpoint has no record."""

    def entries(self, rank: int) -> dict[str, Any]:
        """Structure and Python values of the state, for a rank, from a verified file.

        Args:
            rank: number of the rank. It gets the shared values and its own per-rank values.

        Returns:
            See `array_format.Entries`.
        """
        data = regular_file.read(self.folder / STATE, self.manifest.files[STATE].bytes)
        shared, *of_ranks = json.loads(data)
        if rank < len(of_ranks):
            return {**shared, **of_ranks[rank]}
        return {**shared}

    @contextmanager
    def only_written_by_healcore(self) -> Iterator[None]:
        """Raises CheckpointDamaged for content with the right digests that no store has written.

        Digests are no signature: another program may have written the files. Whatever reading such
        a file raises becomes one error.
        """
        try:
            yield
        except StoreError:
            raise
        except CRAFTED as error:
            reason = f"{type(error).__name__}: {error!s:.200}"
            why = f"holds a state that healcore does not write ({reason})"
            raise _damaged(self.folder, why, STATE) from error


def complete(root: Path, folder: Path, copy: HostCopy, entries: Sequence[Any]) -> None:
    """Completes a save: writes the structure and the manifest, and sets the final name.

    Before the final name is set, the checkpoint does not exist. An older save of the same step is
    removed only after it.

    Args:
        root: directory of the run.
        folder: the temporary directory, in which all ranks have written their arrays.
        copy: the `HostCopy` that was written.
        entries: the shared entries, then the per-rank entries of each rank.
    """
    state = json.dumps(entries, separators=(",", ":"), allow_nan=False)
    (folder / STATE).write_bytes(state.encode())
    if copy.record is not None:
        (folder / RECORD).write_bytes(copy.record)
    digests = files.sync_and_digest(folder)
    has_record = digests.pop(RECORD, None) is not None
    content = {
        "schema": SCHEMA,
        "writer": f"healcore {healcore.__version__}",
        "step": copy.step,
        "created": copy.created,
        "attempt": copy.attempt,
        "files": {name: digest._asdict() for name, digest in digests.items()},
        "nonfinite": copy.nonfinite,
        "healing": has_record,
    }
    files.write_new(folder / MANIFEST, files.seal(content))
    files.sync_directory(folder)
    final = root / directory_name(copy.step, copy.attempt)
    older = set(folders_of(root, copy.step)) - {final}
    replaced = files.new_temporary(root)
    if final.exists():  # its files are deleted after the save is complete: that may take long
        files.rename(final, replaced)
    files.rename(folder, final)
    files.discard(replaced)
    for each in older:
        remove(each)


def remove(folder: Path) -> None:
    """Renames a checkpoint to a temporary name, atomically, then deletes its files.

    Without the rename, a crash in between would leave half a checkpoint under a final name.
    """
    temporary = files.new_temporary(folder.parent)
    try:
        files.rename(folder, temporary)
    except FileNotFoundError:
        return  # another program has removed it
    files.discard(temporary)


def sweep(root: Path) -> list[str]:
    """Removes the temporary files of killed processes.

    The caller has claimed the directory, and nothing is being written.

    Args:
        root: directory of the run.

    Returns:
        The paths of what was removed, relative to the directory.
    """
    removed: list[str] = []
    for folder in [root, *folders_of(root)]:
        for name in _names_in(folder):
            if files.TEMPORARY.fullmatch(name) and files.discard(folder / name):
                removed.append((folder / name).relative_to(root).as_posix())
    return removed


def directory_name(step: int, attempt: int) -> str:
    """Name of a checkpoint's directory. Ten digits sort as numbers."""
    return f"step-{step:010d}.{attempt}"


def step_of(folder: Path) -> int | None:
    """The step in the name of a checkpoint's directory, or None for any other name."""
    match = _STEP.fullmatch(folder.name)
    if match is None:
        return None
    return int(match[1])


def folders_of(root: Path, step: int | None = None) -> list[Path]:
    """The folders with the name of a checkpoint, of all steps or of one step.

    Returns:
        Paths, sorted by name. Empty if the directory cannot be read.
    """
    beginning = "step-" if step is None else f"step-{step:010d}."
    names = [name for name in _names_in(root) if name.startswith(beginning)]
    return [root / name for name in names if _STEP.fullmatch(name)]


class FoundCheckpoints(NamedTuple):
    """The checkpoints that were found in the directories of a run. Their arrays are not read.

    A scan is made for each list and each restore, because other programs may change a directory.
    """

    complete: dict[int, list[StoredCheckpoint]]
    """Step -> the saves of its latest attempt, ascending by step: one for each directory that has
    it, the one with the newest record first."""
    damaged: list[CheckpointDamaged]
    """The errors of directories that have the name of a checkpoint and are not complete, if no
    directory has the checkpoint. A crash leaves none: a save gets its name last, a deletion removes
    it first."""

    @property
    def records(self) -> dict[int, dict[str, Any]]:
        """Step -> its newest record."""
        found: dict[int, dict[str, Any]] = {}
        for step, (first, *_) in self.complete.items():
            if first.record is not None:
                found[step] = first.record
        return found

    @property
    def history(self) -> AttemptHistory:
        """The attempts in the newest record."""
        records = self.records
        return AttemptHistory.newest(AttemptHistory.of(records[step]) for step in records)

    def listed(self, nonfinite_ok: Collection[str]) -> list[CheckpointInfo]:
        """The complete checkpoints with their statuses.

        Args:
            nonfinite_ok: patterns of array names where NaN and Inf are allowed.
        """
        entries: list[CheckpointInfo] = []
        for first, *_ in self.complete.values():
            entries.append(CheckpointInfo.of(first.manifest, str(first.folder), nonfinite_ok))
        return self.history.with_status(entries)


def scan(*roots: Path, step: int | None = None) -> FoundCheckpoints:
    """Looks at every checkpoint, or at the checkpoints of one step.

    A directory may have missed saves and replacements of records, because its disk was full or
    away. So for each step the save of the latest attempt counts, and of its records the newest.

    Args:
        roots: the directories of the run, in the order of preference.
        step: the step, or None for all steps.

    Raises:
        StoreError: a directory cannot be read: an empty list would look like a run without
            checkpoints.
    """
    found: dict[int, list[StoredCheckpoint]] = {}
    damaged: list[CheckpointDamaged] = []
    for root in roots:
        try:
            os.listdir(root)
        except OSError as error:
            raise StoreError(f"{root} cannot be read: {error.strerror}") from None
        for folder in folders_of(root, step):
            try:
                stored = _open(folder)
                found.setdefault(stored.manifest.step, []).append(stored)
            except CheckpointDamaged as error:
                if folder.exists():  # if it is gone, another thread has deleted the checkpoint
                    damaged.append(error)
    for at, saves in found.items():
        latest = max(each.manifest.attempt for each in saves)
        saves = [each for each in saves if each.manifest.attempt == latest]
        # Of equal saves the one with the newest record comes first.
        found[at] = sorted(
            saves, key=lambda each: AttemptHistory.of(each.record).recency, reverse=True
        )
    return FoundCheckpoints(
        dict(sorted(found.items())), [each for each in damaged if each.step not in found]
    )


def find_damage(stored: StoredCheckpoint, rank: int = 0, world: int = 1) -> list[CheckpointDamaged]:
    """Recomputes the digests of a rank's share of the files.

    Args:
        stored: a complete checkpoint.
        rank: number of this rank.
        world: number of ranks, which share the files.

    Returns:
        An error for each damaged file, sorted by name.
    """
    errors: list[CheckpointDamaged] = []

    def compare(name: str) -> None:
        try:
            if files.digest_of(stored.folder / name) != stored.manifest.files[name]:
                errors.append(_damaged(stored.folder, files.DIFFERS, name))
        except (OSError, ValueError) as error:  # ValueError: a byte 0 in the name
            why = getattr(error, "strerror", error)
            errors.append(_damaged(stored.folder, f"cannot be read ({why})", name))

    names = sorted(stored.manifest.files)[rank::world]
    files.map_in_threads(compare, names, stored.manifest.nbytes)
    return sorted(errors, key=lambda error: error.file)


def _open(folder: Path) -> StoredCheckpoint:
    """Opens a complete checkpoint; CheckpointDamaged if manifest or record are damaged."""
    damaged = partial(_damaged, folder)
    content = _read_sealed(folder, MANIFEST)
    if content.pop("schema", None) != SCHEMA:
        raise damaged("is of another version of healcore: resume with that version")
    known = {key: content[key] for key in Manifest._fields if key in content}
    try:
        manifest = _MANIFEST.validate_json(json.dumps(known), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        why = f"has values that healcore does not write: {where!a:.200} ({first['msg']})"
        raise damaged(why) from None
    if folder.name != directory_name(manifest.step, manifest.attempt):
        raise damaged(f"is of step {manifest.step}, attempt {manifest.attempt}")
    record = None
    if manifest.healing or os.path.lexists(folder / RECORD):
        record = _read_sealed(folder, RECORD)
    return StoredCheckpoint(folder, manifest, record)


def _read_sealed(folder: Path, file: str) -> dict[str, Any]:
    """The content of a sealed file of a checkpoint; CheckpointDamaged if it is damaged."""
    try:
        return files.read_sealed(folder / file)
    except OSError as error:
        raise _damaged(folder, f"cannot be read ({error.strerror})", file) from None
    except files.ChecksumError as error:
        raise _damaged(folder, str(error), file) from None


def _damaged(folder: Path, difference: str, file: str = MANIFEST) -> CheckpointDamaged:
    """The error for a damaged file in a directory with the name of a checkpoint."""
    return CheckpointDamaged(step_of(folder) or 0, str(folder), file, difference)


def _names_in(folder: Path) -> list[str]:
    """The sorted names in a directory; empty if it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
