"""The directories of checkpoints: written, listed, verified and removed.

    root/
      step-0000000120.1/               step and attempt of the save
        data/                          files that the framework writes
        state.json                     structure of the state, Python values
        state-rank-00001.json          the same for per-rank values, if the state has any
        manifest.json                  size and digest of all files above
        healing.json                   the record, if one was saved; a rollback replaces it
      step-0000000140.1/
        checkpoint.safetensors         all of this for a small state, see `single_file`
        healing.json                   the record of a rollback; it replaces the record in the file
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
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

import healcore
from healcore import regular_file
from healcore.runtime.store import checksums, files, single_file, values
from healcore.runtime.store.checkpoints import (
    AttemptHistory,
    CheckpointDamaged,
    CheckpointInfo,
    HasSaveFacts,
    StoreError,
)
from healcore.runtime.store.checksums import ChecksumError, Digest

SCHEMA = 3
"""Version of the manifest. A manifest of another version is not read."""
MANIFEST = "manifest.json"
STATE = "state.json"
RECORD = "healing.json"
DATA = "data"
"""Directory of the files that the framework writes."""
_STEP = re.compile(r"step-(\d{10,})\.[0-9a-f]{1,18}")
"""Other versions of healcore had a random suffix."""
_CRAFTED = (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError)
"""Errors that reading raises if another program wrote a file with the right digest."""


def _checked_path(name: str) -> str:
    """A relative path; ValueError if it does not name a file inside the checkpoint."""
    path = PurePosixPath(name)
    outside = path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts
    if outside or "\0" in name or not os.fsencode(name):
        raise ValueError("the file is outside the checkpoint")
    return name


_FilePath = Annotated[str, AfterValidator(_checked_path)]
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class Manifest(NamedTuple):
    """What is read of a manifest. Digests are no signature: anybody may have written the file."""

    step: _Count
    """Number of optimizer steps that the state has had."""
    created: Annotated[float, Field(gt=-(1 << 40), lt=1 << 40)]
    """Wall-clock seconds since 1970."""
    attempt: Annotated[_Count, Field(ge=1)]
    """Number of the attempt that saved the checkpoint, from 1. See `AttemptHistory`."""
    files: Annotated[dict[_FilePath, Digest], Field(min_length=1)]
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

    def damaged(self, file: str, difference: str) -> CheckpointDamaged:
        """Makes the error for a damaged file of this checkpoint.

        Args:
            file: path of the file, relative to `folder`.
            difference: what is wrong with it, such as "is missing".
        """
        return _damaged(self.folder, difference, file)

    @property
    def only_file(self) -> Path | None:
        """The only file of a small checkpoint, or None. See the module `single_file`."""
        if single_file.FILE not in self.manifest.files:
            return None
        return self.folder / single_file.FILE

    def entries(self, rank: int) -> dict[str, Any]:
        """Structure and Python values of the state, for a rank, from verified files.

        Args:
            rank: number of the rank. It gets the shared values and its own per-rank values.

        Returns:
            See `flat_state.Entries`.
        """
        if self.only_file is not None:
            entries: dict[str, Any] = json.loads(single_file.read_header(self.only_file).state)
            if rank == 0:  # this process has saved alone
                return entries
            return _shared(entries)
        digests = self.manifest.files
        names = [STATE]
        if _rank_file(rank) in digests:
            names.append(_rank_file(rank))
        found: dict[str, Any] = {}
        for name in names:
            data = regular_file.read(self.folder / name, digests[name].bytes)
            found |= {**json.loads(data)}
        return found

    @contextmanager
    def only_written_by_healcore(self) -> Iterator[None]:
        """Raises CheckpointDamaged for content with the right digests that no store has written.

        Digests are no signature: another program may have written the files. Whatever reading such
        a file raises becomes one error with the name of the file.
        """
        try:
            yield
        except StoreError:
            raise
        except _CRAFTED as error:
            reason = f"{type(error).__name__}: {error!s:.200}"
            why = f"holds a state that healcore does not write ({reason})"
            file = single_file.FILE
            if self.only_file is None:
                file = STATE
            raise self.damaged(file, why) from error


class SealedState(HasSaveFacts, Protocol):
    """What a manifest needs to know of a `HostCopy`."""

    @property
    def record(self) -> bytes | None:
        """The sealed record of the run, or None."""
        ...


def write_entries(folder: Path, entries: Mapping[str, Mapping[str, Any]], rank: int) -> None:
    """Writes the structure of a state: the shared values once, the per-rank values on each rank.

    Args:
        folder: the new directory of the checkpoint.
        entries: see `flat_state.Entries`.
        rank: number of this rank. Rank 0 writes the shared entries too.
    """
    shared = _shared(entries)
    own = {name: entry for name, entry in entries.items() if name not in shared}
    if own:
        files.write_new(folder / _rank_file(rank), values.to_json(own))
    if rank == 0:
        files.write_new(folder / STATE, values.to_json(shared))


def _shared(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The entries of values that all ranks share."""
    return {name: entry for name, entry in entries.items() if not entry.get("per_rank")}


def write_only_file(folder: Path, copy: SealedState, content: single_file.Content) -> None:
    """Writes a small checkpoint with its manifest as one file.

    Args:
        folder: the new directory of the checkpoint.
        copy: the inspected `HostCopy`.
        content: what `ArrayFormat.content` has made of it.
    """
    manifest = _sealed_manifest(copy, "safetensors", {single_file.FILE: content.digest()})
    files.write_new(folder / single_file.FILE, content.with_manifest(manifest))


def complete(root: Path, folder: Path, copy: SealedState, format_name: str) -> Path:
    """Completes a save: writes the manifest, and sets the final name.

    Before the final name is set, the checkpoint does not exist. An older save of the same step is
    removed only after it.

    Args:
        root: directory of the run.
        folder: the temporary directory, in which all ranks have written their files.
        copy: the `HostCopy` that was written.
        format_name: name of the format of the files.

    Returns:
        The final directory.
    """
    if not (folder / single_file.FILE).exists():
        digests = files.sync_and_digest(folder)
        if copy.record is not None:
            files.write_new(folder / RECORD, copy.record)
        files.write_new(folder / MANIFEST, _sealed_manifest(copy, format_name, digests))
    files.sync_directory(folder)
    final = root / _directory_name(copy.step, copy.attempt)
    older = {each for each in files.entries_of(root) if step_of(each) == copy.step} - {final}
    replaced = final.with_name(files.new_temporary())
    if final.exists():  # its files are deleted after the save is complete: that may take long
        files.rename(final, replaced)
    files.rename(folder, final)
    files.discard(replaced)
    for each in older:
        remove(each)
    return final


def _sealed_manifest(copy: SealedState, format_name: str, digests: Mapping[str, Digest]) -> bytes:
    """The manifest of a `HostCopy`, from the digests of its files."""
    found: dict[str, Any] = {name: digest._asdict() for name, digest in digests.items()}
    has_record = copy.record is not None
    read = Manifest(copy.step, copy.created, copy.attempt, found, copy.nonfinite, has_record)
    writer = {"schema": SCHEMA, "writer": f"healcore {healcore.__version__}", "format": format_name}
    return checksums.seal({**writer, **read._asdict()})


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
    folders = [root]
    folders += [path for path in files.entries_of(root) if step_of(path) is not None]
    removed: list[str] = []
    for folder in folders:
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


class FoundCheckpoints(NamedTuple):
    """The checkpoints that were found in a directory. The content of the files is not read.

    A scan is made for each list and each restore, because other programs may change the directory.
    It reads the manifests and the records, which are small, and the sizes of the files.
    """

    complete: dict[int, StoredCheckpoint]
    """Complete checkpoints by step, ascending; of each step the save of the latest attempt. The
    digests of manifest and record are right, and every file has its size."""
    records: dict[int, dict[str, Any]]
    """The intact records of the run by step, also of checkpoints that are damaged elsewhere."""
    damaged: list[CheckpointDamaged]
    """The errors of directories that have the name of a checkpoint and are not complete. A crash
    leaves none: a save gets its name last, a deletion removes it first."""
    twins: Mapping[int, Sequence[StoredCheckpoint]] = MappingProxyType({})
    """The same saves as in `complete` in other directories of the run; see `merge`."""

    def copies_of(self, step: int) -> list[StoredCheckpoint]:
        """The save of a step in each directory that has it.

        Returns:
            The equal saves, in the order in which to try them. Empty without a complete checkpoint.
        """
        if step not in self.complete:
            return []
        return [self.complete[step], *self.twins.get(step, ())]

    def without(self, folders: Collection[Path]) -> FoundCheckpoints:
        """The scan without the checkpoints in some folders."""
        left: dict[int, StoredCheckpoint] = {}
        for step, stored in self.complete.items():
            if stored.folder not in folders:
                left[step] = stored
        return self._replace(complete=left)


def scan(root: Path | None, step: int | None = None) -> FoundCheckpoints:
    """Looks at every checkpoint, or at the checkpoints of one step.

    Args:
        root: the directory, or None for a store in memory only.
        step: the step, or None for all steps.

    Returns:
        What the directory holds. Empty without a directory.

    Raises:
        StoreError: the directory cannot be read.
    """
    folders: list[Path] = []
    try:
        if root is not None:
            folders = sorted(root.iterdir(), key=lambda each: (len(each.name), each))
    except OSError as error:  # an empty list would look like a run without checkpoints
        raise StoreError(f"{root} cannot be read: {error.strerror}") from error
    found: list[StoredCheckpoint] = []
    records: dict[int, dict[str, Any]] = {}
    damaged: list[CheckpointDamaged] = []
    for folder in folders:
        if step_of(folder) is None or step not in (None, step_of(folder)):
            continue
        try:
            found.append(_open(folder, records))
        except CheckpointDamaged as error:
            if folder.exists():  # if the folder is gone, another thread has deleted the checkpoint
                damaged.append(error)
    found.sort(key=lambda each: (each.manifest.step, each.manifest.attempt))
    return FoundCheckpoints({each.manifest.step: each for each in found}, records, damaged)


def merge(scans: Sequence[FoundCheckpoints]) -> FoundCheckpoints:
    """Combines what was found in several directories of one run.

    A directory may have missed saves and replacements of records, because its disk was full or
    away. So the save of the latest attempt counts, and among equal saves first the save with the
    newest record. A step is damaged only if no directory has a complete checkpoint of it.

    Args:
        scans: the scans of the directories, in the order of preference.
    """
    found: dict[int, list[StoredCheckpoint]] = {}
    records: dict[int, dict[str, Any]] = {}
    for scan in scans:
        for step, stored in scan.complete.items():
            found.setdefault(step, []).append(stored)
        for step, record in scan.records.items():
            records[step] = max(records.get(step, record), record, key=_recency)
    complete: dict[int, StoredCheckpoint] = {}
    twins: dict[int, list[StoredCheckpoint]] = {}
    for step in sorted(found):
        newest_first = sorted(
            found[step],
            key=lambda each: (each.manifest.attempt, _recency(each.record)),
            reverse=True,
        )
        complete[step] = newest_first[0]
        attempt = newest_first[0].manifest.attempt
        twins[step] = [each for each in newest_first[1:] if each.manifest.attempt == attempt]
    damaged = [error for scan in scans for error in scan.damaged if error.step not in complete]
    return FoundCheckpoints(complete, records, damaged, twins)


def _recency(record: Mapping[str, Any] | None) -> tuple[int, int, bool]:
    """Compares records of one checkpoint: the larger, the later it was written."""
    history = AttemptHistory.of(record)
    return len(history.starts), history.known_good_up_to, bool((record or {}).get("completed"))


def listed(found: FoundCheckpoints, nonfinite_ok: Collection[str]) -> list[CheckpointInfo]:
    """The complete checkpoints of a scan with their statuses.

    Args:
        found: what a directory holds, or what `merge` has made of several directories.
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
    digest_of = single_file.digest_of
    if stored.only_file is None:
        digest_of = checksums.digest_of

    def compare(name: str) -> CheckpointDamaged | None:
        try:
            same = digest_of(stored.folder / name) == stored.manifest.files[name]
        except OSError as error:
            return stored.damaged(name, f"cannot be read ({error.strerror})")
        except ChecksumError as error:
            return stored.damaged(name, str(error))
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
        record = records[step] = _read_sealed(folder, RECORD)
    several = any(os.path.lexists(folder / name) for name in (MANIFEST, STATE))
    if os.path.lexists(folder / single_file.FILE) or not several:
        file = record_file = single_file.FILE
        header = _read_header(folder)
        if record is None and header.record is not None:
            record = records[step] = _unsealed(folder, header.record)
        manifest = _checked_manifest(folder, _unsealed(folder, header.manifest), file)
        sizes = {file: header.size}
    else:
        file, record_file = MANIFEST, RECORD
        manifest = _checked_manifest(folder, _read_sealed(folder, file), file)
        sizes = {name: digest.bytes for name, digest in manifest.files.items()}
    if folder.name != _directory_name(manifest.step, manifest.attempt):
        raise _damaged(folder, f"is of step {manifest.step}, attempt {manifest.attempt}", file)
    if manifest.files.keys() != sizes.keys():
        raise _damaged(folder, "has the manifest of other files", file)
    if manifest.healing and record is None:
        raise _damaged(folder, "is missing", record_file)
    _check_sizes(folder, sizes)
    return StoredCheckpoint(folder, manifest, record)


def _check_sizes(folder: Path, sizes: Mapping[str, int]) -> None:
    """Checks that each file is there, with its size. Reads no file."""
    for name, size in sizes.items():
        try:
            status = (folder / name).lstat()
        except OSError as error:
            raise _damaged(folder, f"is missing ({error.strerror})", name) from None
        if not stat.S_ISREG(status.st_mode):
            raise _damaged(folder, "is no regular file", name)
        if status.st_size != size:
            raise _damaged(folder, f"has {status.st_size} bytes instead of {size}", name)


def _checked_manifest(folder: Path, content: dict[str, Any], file: str) -> Manifest:
    """The manifest that a file holds; CheckpointDamaged if it is of another schema or malformed."""
    if content.pop("schema", None) != SCHEMA:
        raise _damaged(folder, "is of another version of healcore: resume with that version", file)
    known = {key: content[key] for key in Manifest._fields if key in content}
    try:
        return _MANIFEST.validate_json(json.dumps(known), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        why = f"has values that healcore does not write: {where!a:.200} ({first['msg']})"
        raise _damaged(folder, why, file) from None


def _read_header(folder: Path) -> single_file.Header:
    """The header of the only file of a small checkpoint; CheckpointDamaged if it is damaged."""
    try:
        return single_file.read_header(folder / single_file.FILE)
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
        raise _damaged(folder, why, single_file.FILE) from None
    except ChecksumError as error:
        raise _damaged(folder, str(error), single_file.FILE) from None


def _unsealed(folder: Path, text: str) -> dict[str, Any]:
    """A sealed text in the only file of a small checkpoint."""
    try:
        return checksums.unseal(text.encode(errors="surrogatepass"))
    except ChecksumError as error:
        raise _damaged(folder, str(error), single_file.FILE) from None


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


def _rank_file(rank: int) -> str:
    """Name of the file with the per-rank values of a rank."""
    return f"state-rank-{rank:05d}.json"
