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
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from healcore.runtime.store import checksummed_json, files
from healcore.runtime.store.checksummed_json import ChecksumError
from healcore.runtime.store.course import Course, newest
from healcore.runtime.store.errors import CheckpointDamaged, StoreError
from healcore.runtime.store.inspection import Digest, disallowed, file_digest, map_in_threads
from healcore.runtime.store.protocol import Saved

SCHEMA = 2
MANIFEST = "manifest.json"
STATE = "state.json"
"""Structure of the state and its Python values."""
HEALING = "healing.json"
DATA = "data"
"""Directory of the files that the framework writes."""
MAX_NAMES = 1000
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
    arrays: _Count
    nonfinite: tuple[str, ...]
    """Names of arrays with NaN or Inf, allowed or not; only the first 1000."""
    healing: bool
    unnamed: _Count
    """Number of arrays with NaN or Inf beyond the first 1000. No pattern can allow these."""

    @property
    def bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(digest.bytes for digest in self.files.values())


_MANIFEST = TypeAdapter(Manifest)


class StoredCheckpoint(NamedTuple):
    """A complete checkpoint on disk."""

    folder: Path
    manifest: Manifest
    healing: dict[str, Any] | None
    """The healing state, or None if the checkpoint has none."""

    def damaged(self, file: str, difference: str, *, malformed: bool = False) -> CheckpointDamaged:
        """Makes the error for a damaged file of this checkpoint."""
        step = self.manifest.step
        return CheckpointDamaged(step, str(self.folder), file, difference, malformed)


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
    try:
        content = checksummed_json.read(folder / MANIFEST)
        if content.pop("schema", None) != SCHEMA:
            raise _damaged(folder, "is of another version of healcore: resume with that version")
        return _MANIFEST.validate_json(json.dumps(content), strict=True)
    except OSError as error:
        raise _damaged(folder, f"cannot be read ({error.strerror})") from None
    except ChecksumError as error:
        raise _damaged(folder, str(error)) from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        why = f"has values that healcore does not write: {where!a:.200} ({first['msg']})"
        raise _damaged(folder, why) from None


def _damaged(folder: Path, difference: str, file: str = MANIFEST) -> CheckpointDamaged:
    return CheckpointDamaged(step_of(folder) or 0, str(folder), file, difference)


def missing_or_resized(folder: Path, manifest: Manifest) -> CheckpointDamaged | None:
    """The error for the first file that is missing or has another size; reads no data."""
    for name, digest in manifest.files.items():
        try:
            status = (folder / name).lstat()
        except OSError as error:
            return _damaged(folder, f"is missing ({error.strerror})", name)
        if not stat.S_ISREG(status.st_mode):
            return _damaged(folder, "is no regular file", name)
        if status.st_size != digest.bytes:
            why = f"has {status.st_size} bytes instead of {digest.bytes}"
            return _damaged(folder, why, name)
    return None


def find_damage(checkpoint: StoredCheckpoint, names: Iterable[str]) -> list[CheckpointDamaged]:
    """Recomputes the digests of the files `names`; returns an error for each damaged file."""

    def compare(name: str) -> CheckpointDamaged | None:
        try:
            same = file_digest(checkpoint.folder / name) == checkpoint.manifest.files[name]
        except OSError as error:
            return checkpoint.damaged(name, f"cannot be read ({error.strerror})")
        return None if same else checkpoint.damaged(name, DIFFERS)

    errors = map_in_threads(compare, list(names), checkpoint.manifest.bytes)
    return sorted((error for error in errors if error), key=lambda error: error.file)


# -- the checkpoints of a store ---------------------------------------------------------------


def step_directory(step: int, attempt: int) -> str:
    """The name of a checkpoint's directory: `step-0000000123.1`."""
    return f"step-{step:010d}.{attempt}"


def step_of(folder: Path) -> int | None:
    """The step in a directory's name, or None for any other name."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def complete(root: Path) -> dict[int, StoredCheckpoint]:
    """Complete checkpoints by step, ascending; of each step the save of the latest attempt.

    In a complete checkpoint the digests of manifest and healing state are right and every file has
    its size. The content of the files is not read.
    """
    opened = [_open(folder) for folder in _checkpoint_folders(root)]
    found = [each for each in opened if isinstance(each, StoredCheckpoint)]
    found.sort(key=lambda each: (each.manifest.step, each.manifest.attempt))
    return {each.manifest.step: each for each in found}


def listed(root: Path, nonfinite_ok: Collection[str]) -> list[Saved]:
    """The entries in `steps` of the complete checkpoints; `nonfinite_ok` has patterns of names."""
    entries = []
    for folder, manifest, _ in complete(root).values():
        nonfinite = disallowed(manifest.nonfinite, nonfinite_ok)
        entry = Saved(
            step=manifest.step,
            status="candidate",
            finite=not nonfinite and not manifest.unnamed,
            bytes=manifest.bytes,
            created=manifest.created,
            attempt=manifest.attempt,
            path=str(folder),
            nonfinite=nonfinite,
        )
        entries.append(entry)
    course = newest([(step, Course.of(each)) for step, each in healings(root).items()])
    return course.judged(entries)


def healings(root: Path) -> dict[int, dict[str, Any]]:
    """The intact healing states by step, also of checkpoints that are damaged elsewhere."""
    found = {}
    for folder in _checkpoint_folders(root):
        with suppress(OSError, ChecksumError):
            found[step_of(folder) or 0] = checksummed_json.read(folder / HEALING)
    return found


def incomplete(root: Path) -> list[CheckpointDamaged]:
    """The errors of directories with the name of a checkpoint that are no complete checkpoint."""
    opened = [_open(folder) for folder in _checkpoint_folders(root)]
    # A directory that has disappeared since was being deleted.
    return [
        error
        for error in opened
        if isinstance(error, CheckpointDamaged) and os.path.exists(error.path)
    ]


def _checkpoint_folders(root: Path) -> list[Path]:
    """The directories with the name of a checkpoint, sorted; StoreError if `root` is unreadable."""
    try:
        folders = sorted(root.iterdir())
    except OSError as error:  # an empty list would look like a run without checkpoints
        raise StoreError(f"{root} cannot be read: {error.strerror}") from error
    return [folder for folder in folders if step_of(folder) is not None]


def _open(folder: Path) -> StoredCheckpoint | CheckpointDamaged:
    try:
        record = read(folder)
    except CheckpointDamaged as error:
        return error
    if folder.name != step_directory(record.step, record.attempt):
        return _damaged(folder, f"is of step {record.step}, attempt {record.attempt}")
    healing = None
    if record.healing or (folder / HEALING).exists():
        try:
            healing = checksummed_json.read(folder / HEALING)
        except OSError as error:
            return _damaged(folder, f"cannot be read ({error.strerror})", HEALING)
        except ChecksumError as error:
            return _damaged(folder, str(error), HEALING)
    return missing_or_resized(folder, record) or StoredCheckpoint(folder, record, healing)
