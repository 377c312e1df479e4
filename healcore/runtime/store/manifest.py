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
        healing.json                   the record of a rollback; it replaces the one in the file
      .tmp-healcore-…/                 work in progress: a save, or a checkpoint being deleted

A save is written to a temporary directory. The manifest is written last and never changed; then the
directory gets its final name. A deletion is the reverse. A directory without a valid manifest is no
checkpoint. Nothing is cached: each function reads the disk.
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
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

import healcore
from healcore import regular_file
from healcore.runtime.store import files, single_file, values
from healcore.runtime.store.checkpoints import (
    AttemptHistory,
    CheckpointDamaged,
    CheckpointInfo,
    StoreError,
)
from healcore.runtime.store.files import ChecksumError, Digest

SCHEMA = 2
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
    created: Annotated[float, Field(gt=-(1 << 40), lt=1 << 40)]
    """Wall-clock seconds since 1970."""
    attempt: Annotated[_Count, Field(ge=1)]
    """Number of the attempt that saved the checkpoint, from 1. See `AttemptHistory`."""
    files: Annotated[dict[_FilePath, Digest], Field(min_length=1)]
    """Relative path -> size and digest, for every file except this one and the record."""
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
    """A complete checkpoint on disk."""

    folder: Path
    manifest: Manifest
    record: dict[str, Any] | None
    """The record of the run, or None if the checkpoint has none."""

    def damaged(self, file: str, difference: str) -> CheckpointDamaged:
        """Makes the error for a damaged file of this checkpoint."""
        return _damaged(self.folder, difference, file)

    @property
    def only_file(self) -> Path | None:
        """The only file of a small checkpoint, or None. See the module `single_file`."""
        name = single_file.FILE
        return self.folder / name if name in self.manifest.files else None

    def entries(self, rank: int) -> dict[str, Any]:
        """Structure and Python values of the state, for a rank, from verified files."""
        sizes = self.manifest.files
        if self.only_file is not None:  # of one process: rank 0
            entries: dict[str, Any] = json.loads(single_file.read_header(self.only_file).state)
            return {n: e for n, e in entries.items() if rank == 0 or not e.get("per_rank")}
        found = {}
        own = _rank_file(rank)
        for name in [STATE, own] if own in sizes else [STATE]:
            found |= {**json.loads(regular_file.read(self.folder / name, sizes[name].bytes))}
        return found

    @contextmanager
    def only_written_by_healcore(self) -> Iterator[None]:
        """Raises CheckpointDamaged for content with the right digests that no store has written."""
        try:
            yield
        except StoreError:
            raise
        except _CRAFTED as error:
            reason = f"{type(error).__name__}: {error!s:.200}"
            why = f"holds a state that healcore does not write ({reason})"
            file = STATE if self.only_file is None else single_file.FILE
            raise self.damaged(file, why) from error


def write_entries(folder: Path, entries: Mapping[str, Mapping[str, Any]], rank: int) -> None:
    """Writes the per-rank entries of this rank, and on rank 0 also the shared entries."""
    own = {name: entry for name, entry in entries.items() if entry.get("per_rank")}
    if own:
        files.write_new(folder / _rank_file(rank), values.to_json(own))
    if rank == 0:
        shared = {name: entry for name, entry in entries.items() if name not in own}
        files.write_new(folder / STATE, values.to_json(shared))


def write_only_file(folder: Path, copy: Any, content: single_file.Content) -> None:
    """Writes a small `HostCopy` with its manifest as one file."""
    manifest = _sealed_manifest(copy, "safetensors", {single_file.FILE: content.digest()})
    files.write_new(folder / single_file.FILE, content.with_manifest(manifest))


def complete(root: Path, folder: Path, copy: Any, format: str) -> Path:
    """Completes the save of a `HostCopy`: writes the manifest, and sets the final name."""
    if not (folder / single_file.FILE).exists():
        digests = files.sync_and_digest(folder)
        if copy.record is not None:
            files.write_new(folder / RECORD, copy.record)
        files.write_new(folder / MANIFEST, _sealed_manifest(copy, format, digests))
    files.sync_directory(folder)
    final = root / _directory_name(copy.step, copy.attempt)
    older = {each for each in files.entries_of(root) if step_of(each) == copy.step} - {final}
    if final.exists():
        remove(final)
    files.rename(folder, final)
    for each in older:
        remove(each)
    return final


def _sealed_manifest(copy: Any, format: str, digests: Mapping[str, Digest]) -> bytes:
    """The manifest of a `HostCopy`, from the digests of its files."""
    found: dict[str, Any] = {name: digest._asdict() for name, digest in digests.items()}
    has_record = copy.record is not None
    read = Manifest(copy.step, copy.created, copy.attempt, found, copy.nonfinite, has_record)
    writer = {"schema": SCHEMA, "writer": f"healcore {healcore.__version__}", "format": format}
    return files.seal({**writer, **read._asdict()})


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
    folders = [root, *(path for path in files.entries_of(root) if step_of(path) is not None)]
    return [
        path.relative_to(root).as_posix()
        for folder in folders
        for path in files.entries_of(folder)
        if files.TEMPORARY.fullmatch(path.name) and files.discard(path)
    ]


def step_of(folder: Path) -> int | None:
    """The step in a directory's name, or None for any other name."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


class Scan(NamedTuple):
    """What a directory of checkpoints holds. The content of the files is not read."""

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
        """The save of a step in each directory that has it, in the order in which to try them."""
        return [self.complete[step], *self.twins.get(step, ())] if step in self.complete else []

    def without(self, folders: Collection[Path]) -> Scan:
        """The scan without the checkpoints in some folders."""
        left = {at: each for at, each in self.complete.items() if each.folder not in folders}
        return self._replace(complete=left)


def scan(root: Path | None, step: int | None = None) -> Scan:
    """Looks at every checkpoint, or at those of one step.

    Args:
        root: the directory, or None for a store in memory only.
        step: the step, or None for all steps.

    Raises:
        StoreError: the directory cannot be read.
    """
    try:
        folders = sorted(root.iterdir(), key=lambda each: (len(each.name), each)) if root else []
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
            if folder.exists():  # else the checkpoint was being deleted
                damaged.append(error)
    found.sort(key=lambda each: (each.manifest.step, each.manifest.attempt))
    return Scan({each.manifest.step: each for each in found}, records, damaged)


def merge(scans: Sequence[Scan]) -> Scan:
    """One scan of several directories of one run, in the order of preference.

    A directory may have missed saves and replacements of records, because its disk was full or
    away. So the save of the latest attempt counts, and of equal saves first the one whose record is
    the newest. A step is damaged only if no directory has a complete checkpoint of it.
    """
    found: dict[int, list[StoredCheckpoint]] = {}
    records: dict[int, dict[str, Any]] = {}
    for scan in scans:
        for step, stored in scan.complete.items():
            found.setdefault(step, []).append(stored)
        for step, record in scan.records.items():
            records[step] = max(records.get(step, record), record, key=_age)
    complete, twins = {}, {}
    for step in sorted(found):
        found[step].sort(key=lambda each: (each.manifest.attempt, _age(each.record)), reverse=True)
        complete[step], *others = found[step]
        attempt = complete[step].manifest.attempt
        twins[step] = [each for each in others if each.manifest.attempt == attempt]
    damaged = [error for scan in scans for error in scan.damaged if error.step not in complete]
    return Scan(complete, records, damaged, twins)


def _age(record: Mapping[str, Any] | None) -> tuple[int, int, bool]:
    """Compares records of one checkpoint: the larger, the later it was written."""
    history = AttemptHistory.of(record)
    return len(history.starts), history.known_good_up_to, bool((record or {}).get("completed"))


def listed(found: Scan, nonfinite_ok: Collection[str]) -> list[CheckpointInfo]:
    """The entries of the complete checkpoints; `nonfinite_ok` has patterns of names."""
    saves = found.complete.values()
    entries = [CheckpointInfo.of(each.manifest, str(each.folder), nonfinite_ok) for each in saves]
    return AttemptHistory.newest(found.records).with_status(entries)


def find_damage(stored: StoredCheckpoint, rank: int = 0, world: int = 1) -> list[CheckpointDamaged]:
    """Recomputes the digests of a rank's share of the files; returns an error for each damage."""
    digest_of = files.digest_of if stored.only_file is None else single_file.digest_of

    def compare(name: str) -> CheckpointDamaged | None:
        try:
            same = digest_of(stored.folder / name) == stored.manifest.files[name]
        except OSError as error:
            return stored.damaged(name, f"cannot be read ({error.strerror})")
        except ChecksumError as error:
            return stored.damaged(name, str(error))
        return None if same else stored.damaged(name, files.DIFFERS)

    names = sorted(stored.manifest.files)[rank::world]
    errors = files.map_in_threads(compare, names, stored.manifest.nbytes)
    return sorted((error for error in errors if error), key=lambda error: error.file)


def _open(folder: Path, records: dict[int, dict[str, Any]]) -> StoredCheckpoint:
    """Opens a complete checkpoint. Adds its record to `records`, if that is intact."""
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
    for name, size in sizes.items():
        try:
            status = (folder / name).lstat()
        except OSError as error:
            raise _damaged(folder, f"is missing ({error.strerror})", name) from None
        if not stat.S_ISREG(status.st_mode):
            raise _damaged(folder, "is no regular file", name)
        if status.st_size != size:
            raise _damaged(folder, f"has {status.st_size} bytes instead of {size}", name)
    return StoredCheckpoint(folder, manifest, record)


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
        return files.unseal(text.encode(errors="surrogatepass"))
    except ChecksumError as error:
        raise _damaged(folder, str(error), single_file.FILE) from None


def _read_sealed(folder: Path, file: str) -> dict[str, Any]:
    try:
        return files.read_sealed(folder / file)
    except OSError as error:
        raise _damaged(folder, f"cannot be read ({error.strerror})", file) from None
    except ChecksumError as error:
        raise _damaged(folder, str(error), file) from None


def _damaged(folder: Path, difference: str, file: str = MANIFEST) -> CheckpointDamaged:
    return CheckpointDamaged(step_of(folder) or 0, str(folder), file, difference)


def _directory_name(step: int, attempt: int) -> str:
    return f"step-{step:010d}.{attempt}"


def _rank_file(rank: int) -> str:
    return f"state-rank-{rank:05d}.json"
