"""The manifest: what a complete checkpoint consists of, and which directories of a store are one.

It is written last and never changed. A directory without a valid manifest is no checkpoint. The
status, which does change, has a file of its own. Nothing is cached: each function reads the disk.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from healcore.runtime.store import checksummed_json, files
from healcore.runtime.store.checksummed_json import ChecksumError
from healcore.runtime.store.errors import CheckpointDamaged, StoreError
from healcore.runtime.store.inspection import Digest, disallowed, file_digest, mapped
from healcore.runtime.store.protocol import STATUSES, Saved, Status

SCHEMA = 1
MANIFEST = "manifest.json"
STATUS = "status.json"
STATE = "state.json"
"""Structure of the state and its Python values."""
HEALING = "healing.json"
DATA = "data"
"""Directory of the files that the framework's own writer wrote."""
HEALER = "healcore."
"""Prefix of the Healer's own files in the root; no store touches them."""
NAMES_KEPT = 1000
DIFFERS = "is not what was written: its digest differs"
_STEP = re.compile(r"step-(\d{10,})\.[0-9a-f]{8}")


def _inside(name: str) -> str:
    """The name; ValueError if it leads to a file outside the checkpoint, or to no file."""
    path = PurePosixPath(name)
    outside = path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts
    if outside or "\0" in name or not os.fsencode(name):
        raise ValueError("the file is outside the checkpoint")
    return name


_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class Manifest(NamedTuple):
    """The content of a manifest. Digests are no secret: anybody may have written the file."""

    step: _Count
    created: Annotated[float, Field(gt=-(1 << 40), lt=1 << 40)]
    """Wall-clock seconds since 1970."""
    save: Annotated[_Count, Field(ge=1)]
    """1 for the first save of this step, one more for each further save: clocks may jump."""
    writer: str
    format: str
    """"dcp" or "orbax"."""
    files: Annotated[dict[Annotated[str, AfterValidator(_inside)], Digest], Field(min_length=1)]
    """Relative path -> size and digest, of every file but the manifest and the status."""
    arrays: _Count
    nonfinite: tuple[str, ...]
    """Names of arrays with NaN or Inf, allowed or not; only the first 1000."""
    healing: bool
    unnamed: _Count
    """Number of further arrays with NaN or Inf. No pattern can allow these."""

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(digest.bytes for digest in self.files.values())


_MANIFEST = TypeAdapter(Manifest)


class Found(NamedTuple):
    """A complete checkpoint."""

    folder: Path
    manifest: Manifest

    def damaged(self, file: str, difference: str, *, malformed: bool = False) -> CheckpointDamaged:
        """The error for a file of this checkpoint."""
        step = self.manifest.step
        return CheckpointDamaged(step, str(self.folder), file, difference, malformed)


def write(folder: Path, manifest: Manifest) -> None:
    """Completes a checkpoint. All other files of `folder` are on disk already."""
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
            raise _damaged(folder, "is of a schema this version does not know: upgrade healcore")
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
            found = (folder / name).lstat()
        except OSError as error:
            return _damaged(folder, f"cannot be found ({error.strerror})", name)
        if not stat.S_ISREG(found.st_mode):
            return _damaged(folder, "is no file any more", name)
        if found.st_size != digest.bytes:
            why = f"has {found.st_size} bytes, {digest.bytes} were written"
            return _damaged(folder, why, name)
    return None


def differences(found: Found, names: Iterable[str]) -> list[CheckpointDamaged]:
    """Recomputes the digests of the files `names`; the errors of the files that differ."""

    def compare(name: str) -> CheckpointDamaged | None:
        try:
            same = file_digest(found.folder / name) == found.manifest.files[name]
        except OSError as error:
            return found.damaged(name, f"cannot be read ({error.strerror})")
        return None if same else found.damaged(name, DIFFERS)

    results = mapped(compare, list(names), found.manifest.bytes)
    return [each for each in results if each is not None]


def saved(found: Found, nonfinite_ok: Collection[str]) -> Saved:
    """The checkpoint as `steps` lists it; `nonfinite_ok` has patterns of array names."""
    manifest = found.manifest
    bad = disallowed(manifest.nonfinite, nonfinite_ok)
    return Saved(
        step=manifest.step,
        status=read_status(found.folder),
        finite=not bad and not manifest.unnamed,
        bytes=manifest.bytes,
        created=manifest.created,
        healing=manifest.healing,
        path=str(found.folder),
        nonfinite=bad,
    )


def write_status(folder: Path, status: Status) -> None:
    """Sets the status; a crash leaves the old status or the new one."""
    files.replace(folder / STATUS, checksummed_json.dumps({"schema": SCHEMA, "status": status}))


def read_status(folder: Path) -> Status:
    """The status. Without an intact status file the checkpoint is a candidate."""
    return stated(folder) or "candidate"


def stated(folder: Path) -> Status | None:
    """The status, or None if its file is missing or damaged."""
    try:
        status = checksummed_json.read(folder / STATUS).get("status")
    except (OSError, ChecksumError):
        return None
    return status if status in STATUSES else None


# -- the checkpoints of a store ---------------------------------------------------------------


def step_directory(step: int) -> str:
    """A new name for a save's directory, with a random end: `step-0000000123.0a1b2c3d`."""
    return f"step-{step:010d}.{secrets.token_hex(4)}"


def step_of(folder: Path) -> int | None:
    """The step in a directory's name, or None for any other name."""
    found = _STEP.fullmatch(folder.name)
    return int(found[1]) if found else None


def complete(root: Path) -> dict[int, list[Found]]:
    """Complete checkpoints by step, ascending; of one step the newest save first.

    In a complete checkpoint the digest of the manifest is right and every file has its size. The
    content of the files is not read.
    """
    found: dict[int, list[Found]] = {}
    for folder in _folders(root):
        checked = _check(folder)
        if isinstance(checked, Found):
            found.setdefault(checked.manifest.step, []).append(checked)
    for saves in found.values():
        saves.sort(key=lambda each: (-each.manifest.save, each.folder.name))
    return dict(sorted(found.items()))


def incomplete(root: Path) -> list[CheckpointDamaged]:
    """The error of each directory that has a checkpoint's name and is no complete checkpoint."""
    checked = [_check(folder) for folder in _folders(root)]
    # A directory that has gone in the meantime was being deleted.
    return [
        each
        for each in checked
        if isinstance(each, CheckpointDamaged) and os.path.exists(each.path)
    ]


def counting(root: Path) -> dict[int, Found]:
    """The save that counts for each step, ascending."""
    return {step: newest(saves) for step, saves in complete(root).items()}


def newest(saves: list[Found]) -> Found:
    """The newest save of one step that is not quarantined, or the newest if all are."""
    for each in saves:
        if read_status(each.folder) != "quarantined":
            return each
    return saves[0]


def problems(root: Path) -> list[str]:
    """A sentence about everything in a store that a person might want to look at."""
    found = [
        f"{Path(each.path).name} is no complete checkpoint: {each.file} {each.difference}"
        for each in incomplete(root)
    ]
    for saves in complete(root).values():
        for each in saves:
            found += _oddities(each)
    for name in _names(root):
        if files.is_temporary(name):
            if not files.is_of_this_place(name):
                found.append(
                    f"{name} is work of a process that cannot be seen from here: a start an hour "
                    "after its last change removes it"
                )
        elif step_of(root / name) is None and not name.startswith(HEALER):
            found.append(f"{name} was not written by healcore")
    return found


def _oddities(checkpoint: Found) -> list[str]:
    """Sentences about files that the manifest does not list, and about a damaged status."""
    folder = checkpoint.folder
    extra = set(files.below(folder)) - {MANIFEST, STATUS} - set(checkpoint.manifest.files)
    found = [
        f"{folder.name} has a file that its manifest does not list: {x}" for x in sorted(extra)
    ]
    if os.path.lexists(folder / STATUS) and stated(folder) is None:
        found.append(f"{folder.name} has a damaged {STATUS}: it counts as not yet verified")
    return found


def _folders(root: Path) -> list[Path]:
    return [root / name for name in _names(root) if step_of(root / name) is not None]


def _names(root: Path) -> list[str]:
    """The names of everything in a store, sorted; StoreError if it cannot be read."""
    try:
        return sorted(os.listdir(root))
    except OSError as error:  # an empty list would look like a run without checkpoints
        raise StoreError(f"{root} cannot be read: {error.strerror}") from error


def _check(folder: Path) -> Found | CheckpointDamaged:
    try:
        record = read(folder)
    except CheckpointDamaged as error:
        return error
    if record.step != step_of(folder):
        return _damaged(folder, f"is of step {record.step}")
    return missing_or_resized(folder, record) or Found(folder, record)
