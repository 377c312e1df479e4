"""The manifest lists the files of a complete checkpoint, with their sizes and digests.

It is written last and never changed. A directory without a valid manifest is no checkpoint. The
healing state, which a rollback replaces, has a digest of its own. Nothing is cached: each function
reads the disk.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from healcore.runtime.store import checksummed_json, files
from healcore.runtime.store.checksummed_json import ChecksumError
from healcore.runtime.store.errors import CheckpointDamaged, StoreError
from healcore.runtime.store.inspection import Digest, file_digest, map_in_threads
from healcore.runtime.store.saved import Course, Saved

SCHEMA = 2
MANIFEST = "manifest.json"
STATE = "state.json"
"""Structure of the state and its Python values."""
HEALING = "healing.json"
DATA = "data"
"""Directory of the files that the framework writes."""
DIFFERS = "is not what was written: its digest differs"
_STEP = re.compile(r"step-(\d{10,})\.[0-9a-f]{1,18}")
"""Other versions of healcore had a random suffix."""


def _checked_path(name: str) -> str:
    """Returns a relative path; ValueError if it does not name a file inside the checkpoint."""
    path = PurePosixPath(name)
    outside = path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts
    if outside or "\0" in name or not os.fsencode(name):
        raise ValueError("the file is outside the checkpoint")
    return name


_FilePath = Annotated[str, AfterValidator(_checked_path)]
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class Manifest(NamedTuple):
    """The content of a manifest. Digests are no signature: anybody may have written the file."""

    step: _Count
    created: Annotated[float, Field(gt=-(1 << 40), lt=1 << 40)]
    """Wall-clock seconds since 1970."""
    attempt: Annotated[_Count, Field(ge=1)]
    """Number of the attempt that saved the checkpoint, from 1. See `Course`."""
    writer: str
    format: str
    """"dcp" or "orbax"."""
    files: Annotated[dict[_FilePath, Digest], Field(min_length=1)]
    """Relative path -> size and digest, for every file except this one and the healing state."""
    nonfinite: tuple[str, ...]
    """Names of arrays with NaN or Inf, allowed or not."""
    healing: bool

    @property
    def nbytes(self) -> int:
        """Size of all files in bytes."""
        return sum(digest.bytes for digest in self.files.values())


_MANIFEST = TypeAdapter(Manifest)


class StoredCheckpoint(NamedTuple):
    """A complete checkpoint on disk."""

    folder: Path
    manifest: Manifest
    healing: dict[str, Any] | None
    """The healing state, or None if the checkpoint has none."""

    def damaged(self, file: str, difference: str) -> CheckpointDamaged:
        """Makes the error for a damaged file of this checkpoint."""
        return _damaged(self.folder, difference, file)


def write(folder: Path, manifest: Manifest) -> None:
    """Completes a checkpoint. All other files of `folder` must be on disk."""
    listed = {name: digest._asdict() for name, digest in manifest.files.items()}
    content = {"schema": SCHEMA, **manifest._asdict(), "files": listed}
    files.write_new(folder / MANIFEST, checksummed_json.dumps(content))


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointDamaged: the manifest is missing, torn, altered or of another schema.
    """
    content = _read_json(folder, MANIFEST)
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


def _read_json(folder: Path, file: str) -> dict[str, Any]:
    try:
        return checksummed_json.read(folder / file)
    except OSError as error:
        raise _damaged(folder, f"cannot be read ({error.strerror})", file) from None
    except ChecksumError as error:
        raise _damaged(folder, str(error), file) from None


def _damaged(folder: Path, difference: str, file: str = MANIFEST) -> CheckpointDamaged:
    return CheckpointDamaged(step_of(folder) or 0, str(folder), file, difference)


def _check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raises CheckpointDamaged for a file that is missing or has another size; reads no data."""
    for name, digest in manifest.files.items():
        try:
            status = (folder / name).lstat()
        except OSError as error:
            raise _damaged(folder, f"is missing ({error.strerror})", name) from None
        if not stat.S_ISREG(status.st_mode):
            raise _damaged(folder, "is no regular file", name)
        if status.st_size != digest.bytes:
            why = f"has {status.st_size} bytes instead of {digest.bytes}"
            raise _damaged(folder, why, name)


def check(checkpoint: StoredCheckpoint, rank: int, world: int) -> None:
    """Recomputes the digests of a rank's share of the files; CheckpointDamaged for a difference."""
    for error in find_damage(checkpoint, sorted(checkpoint.manifest.files)[rank::world]):
        raise error


def find_damage(checkpoint: StoredCheckpoint, names: Iterable[str]) -> list[CheckpointDamaged]:
    """Recomputes the digests of the files `names`; returns an error for each damaged file."""

    def compare(name: str) -> CheckpointDamaged | None:
        try:
            same = file_digest(checkpoint.folder / name) == checkpoint.manifest.files[name]
        except OSError as error:
            return checkpoint.damaged(name, f"cannot be read ({error.strerror})")
        return None if same else checkpoint.damaged(name, DIFFERS)

    errors = map_in_threads(compare, list(names), checkpoint.manifest.nbytes)
    return sorted((error for error in errors if error), key=lambda error: error.file)


# -- the checkpoints of a store ---------------------------------------------------------------


def step_directory(step: int, attempt: int) -> str:
    """The name of a checkpoint's directory: `step-0000000123.1`."""
    return f"step-{step:010d}.{attempt}"


def step_of(folder: Path) -> int | None:
    """The step in a directory's name, or None for any other name."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


class Scan(NamedTuple):
    """What a directory of checkpoints holds. The content of the files is not read."""

    complete: dict[int, StoredCheckpoint]
    """Complete checkpoints by step, ascending; of each step the save of the latest attempt. The
    digests of manifest and healing state are right, and every file has its size."""
    healings: dict[int, dict[str, Any]]
    """The intact healing states by step, also of checkpoints that are damaged elsewhere."""
    damaged: list[CheckpointDamaged]
    """The errors of directories that have the name of a checkpoint and are not complete."""


def scan(root: Path) -> Scan:
    """Looks at every checkpoint; StoreError if the directory cannot be read."""
    try:
        folders = sorted(root.iterdir())
    except OSError as error:  # an empty list would look like a run without checkpoints
        raise StoreError(f"{root} cannot be read: {error.strerror}") from error
    found: list[StoredCheckpoint] = []
    healings: dict[int, dict[str, Any]] = {}
    damaged: list[CheckpointDamaged] = []
    for folder in folders:
        if step_of(folder) is None:
            continue
        try:
            found.append(_open(folder, healings))
        except CheckpointDamaged as error:
            if folder.exists():  # else the checkpoint was being deleted
                damaged.append(error)
    found.sort(key=lambda each: (each.manifest.step, each.manifest.attempt))
    return Scan({each.manifest.step: each for each in found}, healings, damaged)


def listed(found: Scan, nonfinite_ok: Collection[str]) -> list[Saved]:
    """The entries in `steps` of the complete checkpoints; `nonfinite_ok` has patterns of names."""
    saves = found.complete.values()
    entries = [Saved.of(each.manifest, str(each.folder), nonfinite_ok) for each in saves]
    return Course.newest(found.healings).judged(entries)


def _open(folder: Path, healings: dict[int, dict[str, Any]]) -> StoredCheckpoint:
    """Opens a complete checkpoint. Adds its healing state to `healings`, if that is intact."""
    healing = damage = None
    try:
        healing = healings[step_of(folder) or 0] = _read_json(folder, HEALING)
    except CheckpointDamaged as error:
        damage = error
    record = read(folder)
    if folder.name != step_directory(record.step, record.attempt):
        raise _damaged(folder, f"is of step {record.step}, attempt {record.attempt}")
    if damage is not None and (record.healing or (folder / HEALING).exists()):
        raise damage
    _check_sizes(folder, record)
    return StoredCheckpoint(folder, record, healing)
