"""The directories of checkpoints: written, listed, verified and removed.

    root/
      step-0000000120.1/               step and attempt of the save
        data/                          arrays, in the files of the framework; see `small_file`
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

A run may have several directories. Each has every checkpoint, unless its disk was full or away.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError

import healcore
from healcore import regular_file
from healcore.runtime.store import checksums, files, values
from healcore.runtime.store.checkpoints import (
    AttemptHistory,
    CheckpointDamaged,
    CheckpointInfo,
    StoreError,
)
from healcore.runtime.store.checksums import ChecksumError, Digest
from healcore.runtime.store.state_copy import HostCopy

SCHEMA = 4
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
    """Wall-clock seconds since 1970. Equal only for the same save."""
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
    """A complete checkpoint on disk.

    Complete means: the digests of manifest and record are right, and every file has its size. That
    the content of the files is right is checked before a restore, by `find_damage`.
    """

    folder: Path
    """Directory of the checkpoint."""
    manifest: Manifest
    """Step, attempt, and the digests of its files."""
    record: dict[str, Any] | None
    """The record of the run, or None if the checkpoint has no record."""
    twins: Sequence[StoredCheckpoint] = ()
    """The checkpoints of the same attempt in the other directories of the run."""

    def damaged(self, file: str, difference: str) -> CheckpointDamaged:
        """Makes the error for a damaged file of this checkpoint.

        Args:
            file: path of the file, relative to `folder`.
            difference: what is wrong with it, such as "is missing".
        """
        return _damaged(self.folder, difference, file)

    def entries(self, rank: int) -> dict[str, Any]:
        """Structure and Python values of the state, for a rank, from a verified file.

        Args:
            rank: number of the rank. It gets the shared values and its own per-rank values.

        Returns:
            See `state_copy.Entries`.
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
            raise self.damaged(STATE, why) from error


def complete(
    root: Path, folder: Path, copy: HostCopy, entries: Sequence[Any], format_name: str
) -> Path:
    """Completes a save: writes the structure and the manifest, and sets the final name.

    Before the final name is set, the checkpoint does not exist. An older save of the same step is
    removed only after it.

    Args:
        root: directory of the run.
        folder: the temporary directory, in which all ranks have written their arrays.
        copy: the `HostCopy` that was written.
        entries: the shared entries, then the per-rank entries of each rank.
        format_name: name of the format of the arrays.

    Returns:
        The final directory.
    """
    files.write_new(folder / STATE, values.to_json(entries))
    digests = files.sync_and_digest(folder)
    has_record = copy.record is not None
    if copy.record is not None:
        files.write_new(folder / RECORD, copy.record)
    found: dict[str, Any] = {name: digest._asdict() for name, digest in digests.items()}
    manifest = Manifest(copy.step, copy.created, copy.attempt, found, copy.nonfinite, has_record)
    writer = {"schema": SCHEMA, "writer": f"healcore {healcore.__version__}", "format": format_name}
    files.write_new(folder / MANIFEST, checksums.seal({**writer, **manifest._asdict()}))
    files.sync_directory(folder)
    final = root / _directory_name(copy.step, copy.attempt)
    older = set(folders_of(root, copy.step)) - {final}
    replaced = final.with_name(files.new_temporary())
    if final.exists():  # its files are deleted after the save is complete: that may take long
        files.rename(final, replaced)
    files.rename(folder, final)
    files.discard(replaced)
    for each in older:
        remove(each)
    return final


def remove(folder: Path) -> None:
    """Renames a checkpoint to a temporary name, atomically, then deletes its files.

    Without the rename, a crash in between would leave half a checkpoint under a final name.
    """
    temporary = folder.with_name(files.new_temporary())
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
        for path in files.entries_of(folder):
            if files.TEMPORARY.fullmatch(path.name) and files.discard(path):
                removed.append(path.relative_to(root).as_posix())
    return removed


def step_of(folder: Path) -> int | None:
    """The step in the name of a checkpoint's directory.

    Args:
        folder: any path. Nothing is read.

    Returns:
        The step, or None for any other name.
    """
    match = _STEP.fullmatch(folder.name)
    if match is None:
        return None
    return int(match[1])


def folders_of(root: Path, step: int | None = None) -> list[Path]:
    """The folders with the name of a checkpoint, of all steps or of one step.

    Returns:
        Paths, sorted by name. Empty if the directory cannot be read.
    """
    found: list[Path] = []
    for folder in files.entries_of(root):
        of_step = step_of(folder)
        if of_step is not None and step in (None, of_step):
            found.append(folder)
    return found


class FoundCheckpoints(NamedTuple):
    """The checkpoints that were found in the directories of a run. Their arrays are not read.

    A scan is made for each list and each restore, because other programs may change a directory.
    It reads the manifests and the records, which are small, and the sizes of the files.
    """

    complete: dict[int, StoredCheckpoint]
    """Complete checkpoints by step, ascending; of each step the save of the latest attempt, and
    among equal saves the save with the newest record."""
    records: dict[int, dict[str, Any]]
    """The newest intact record by step, also of checkpoints that are damaged elsewhere."""
    damaged: list[CheckpointDamaged]
    """The errors of directories that have the name of a checkpoint and are not complete. A crash
    leaves none: a save gets its name last, a deletion removes it first."""
    unreadable: list[StoreError]
    """The errors of the directories of the run that cannot be read."""


def scan(*roots: Path, step: int | None = None) -> FoundCheckpoints:
    """Looks at every checkpoint, or at the checkpoints of one step.

    A directory may have missed saves and replacements of records, because its disk was full or
    away. So for each step the save of the latest attempt counts, and of its records the newest.

    Args:
        roots: the directories of the run, in the order of preference.
        step: the step, or None for all steps.

    Raises:
        StoreError: no directory can be read.
    """
    found: dict[int, list[StoredCheckpoint]] = {}
    result = FoundCheckpoints({}, {}, [], [])
    for root in roots:
        try:
            os.listdir(root)
        except OSError as error:  # an empty list would look like a run without checkpoints
            result.unreadable.append(StoreError(f"{root} cannot be read: {error.strerror}"))
        for folder in folders_of(root, step):
            try:
                stored = _open(folder, result.records)
                found.setdefault(stored.manifest.step, []).append(stored)
            except CheckpointDamaged as error:
                if folder.exists():  # if it is gone, another thread has deleted the checkpoint
                    result.damaged.append(error)
    if roots and len(result.unreadable) == len(roots):
        raise result.unreadable[0]
    for each in sorted(found):
        saves = sorted(found[each], key=_recency, reverse=True)
        twins = [twin for twin in saves[1:] if twin.manifest.attempt == saves[0].manifest.attempt]
        result.complete[each] = saves[0]._replace(twins=twins)
    result.damaged[:] = [each for each in result.damaged if each.step not in result.complete]
    return result


def _recency(stored: StoredCheckpoint) -> tuple[int, tuple[int, int, bool]]:
    """Compares saves of one step: the larger, the later the save and its record were written."""
    return stored.manifest.attempt, _recency_of_record(stored.record)


def _recency_of_record(record: Mapping[str, Any] | None) -> tuple[int, int, bool]:
    """Compares records of one checkpoint: the larger, the later it was written."""
    history = AttemptHistory.of(record)
    return len(history.starts), history.known_good_up_to, bool((record or {}).get("completed"))


def listed(found: FoundCheckpoints, nonfinite_ok: Collection[str]) -> list[CheckpointInfo]:
    """The complete checkpoints of a scan with their statuses.

    Args:
        found: what the directories hold.
        nonfinite_ok: patterns of array names where NaN and Inf are allowed.
    """
    entries: list[CheckpointInfo] = []
    for stored in found.complete.values():
        entries.append(CheckpointInfo.of(stored.manifest, str(stored.folder), nonfinite_ok))
    return AttemptHistory.newest(found.records).with_status(entries)


def find_damage(stored: StoredCheckpoint, rank: int = 0, world: int = 1) -> list[CheckpointDamaged]:
    """Recomputes the digests of a rank's share of the files.

    Args:
        stored: a complete checkpoint, whose files have their sizes.
        rank: number of this rank.
        world: number of ranks, which share the files.

    Returns:
        An error for each damaged file, sorted by name.
    """

    def compare(name: str) -> CheckpointDamaged | None:
        try:
            same = checksums.digest_of(stored.folder / name) == stored.manifest.files[name]
        except OSError as error:
            return stored.damaged(name, f"cannot be read ({error.strerror})")
        if same:
            return None
        return stored.damaged(name, checksums.DIFFERS)

    names = sorted(stored.manifest.files)[rank::world]
    results = files.map_in_threads(compare, names, stored.manifest.nbytes)
    errors = [error for error in results if error is not None]
    return sorted(errors, key=lambda error: error.file)


def _open(folder: Path, records: dict[int, dict[str, Any]]) -> StoredCheckpoint:
    """Opens a complete checkpoint. Adds its record to `records` if the record is intact."""
    step = step_of(folder) or 0
    record = None
    if os.path.lexists(folder / RECORD):
        record = _read_sealed(folder, RECORD)
        records[step] = max(records.get(step, record), record, key=_recency_of_record)
    manifest = _checked_manifest(folder, _read_sealed(folder, MANIFEST))
    if folder.name != _directory_name(manifest.step, manifest.attempt):
        raise _damaged(folder, f"is of step {manifest.step}, attempt {manifest.attempt}")
    if manifest.healing and record is None:
        raise _damaged(folder, "is missing", RECORD)
    for name, digest in manifest.files.items():
        _check_size(folder, name, digest.bytes)
    return StoredCheckpoint(folder, manifest, record)


def _check_size(folder: Path, name: str, size: int) -> None:
    """Checks that a file is there, with its size. Does not read it."""
    try:
        status = (folder / name).lstat()
    except OSError as error:
        raise _damaged(folder, f"is missing ({error.strerror})", name) from None
    except ValueError:  # a byte 0 in a name that another program has written
        raise _damaged(folder, "is no name of a file", name) from None
    if not stat.S_ISREG(status.st_mode):
        raise _damaged(folder, "is no regular file", name)
    if status.st_size != size:
        raise _damaged(folder, f"has {status.st_size} bytes instead of {size}", name)


def _checked_manifest(folder: Path, content: dict[str, Any]) -> Manifest:
    """The manifest in a file; CheckpointDamaged if it is of another schema or malformed."""
    if content.pop("schema", None) != SCHEMA:
        raise _damaged(folder, "is of another version of healcore: resume with that version")
    known = {key: content[key] for key in Manifest._fields if key in content}
    try:
        return _MANIFEST.validate_json(json.dumps(known), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        why = f"has values that healcore does not write: {where!a:.200} ({first['msg']})"
        raise _damaged(folder, why) from None


def _read_sealed(folder: Path, file: str) -> dict[str, Any]:
    """The content of a sealed file of a checkpoint; CheckpointDamaged if it is damaged."""
    try:
        return checksums.read_sealed(folder / file)
    except OSError as error:
        raise _damaged(folder, f"cannot be read ({error.strerror})", file) from None
    except ChecksumError as error:
        raise _damaged(folder, str(error), file) from None


def _damaged(folder: Path, difference: str, file: str = MANIFEST) -> CheckpointDamaged:
    """The error for a damaged file in a directory with the name of a checkpoint."""
    return CheckpointDamaged(step_of(folder) or 0, str(folder), file, difference)


def _directory_name(step: int, attempt: int) -> str:
    """Name of a checkpoint's directory. Ten digits sort as numbers."""
    return f"step-{step:010d}.{attempt}"
