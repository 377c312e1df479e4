"""The manifest: what a complete checkpoint consists of, and which directories of a store are one.

It is written last and never changed. A directory without a valid one is no checkpoint. The status,
which does change, has a file of its own. Nothing is cached: every question reads the disk again.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from healcore.runtime.store import checksummed_json, files
from healcore.runtime.store.checksummed_json import ChecksumError
from healcore.runtime.store.errors import StoreError
from healcore.runtime.store.inspection import Digest, disallowed, file_digest, mapped
from healcore.runtime.store.protocol import STATUSES, Saved, Status

SCHEMA = 1
MANIFEST = "manifest.json"
STATUS = "status.json"
STATE = "state.json"
"""Structure of the state and its Python values."""
HEALING = "healing.json"
DATA = "data"
"""Directory of what the framework's own writer wrote."""
HEALER = "healcore."
"""Prefix of the files that a Healer keeps in the root about its run; no store touches them."""
_STEP = re.compile(r"step-(\d{10,})\.[0-9a-f]{8}")
NAMES_KEPT = 1000
DIFFERS = "is not what was written: its digest differs"
_ONCE_KEPT = 20
"""How many names manifests without `unnamed`, which are older, kept."""


class BadManifest(ValueError):
    """There is no manifest, or it is not as it was written."""


class Manifest(NamedTuple):
    """A complete checkpoint."""

    step: int
    created: float
    """Wall-clock seconds since 1970."""
    save: int
    """1 for the first save of this step, one more for each further one: clocks may jump."""
    writer: str
    format: str
    """"dcp" or "orbax"."""
    files: Mapping[str, Digest]
    """Relative path -> size and digest, of every file but the manifest and the status."""
    arrays: int
    nonfinite: tuple[str, ...]
    """Names of arrays with NaN or Inf, allowed or not; only the first 1000."""
    healing: bool
    unnamed: int = 0
    """How many more there are; no pattern can allow those."""

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(digest.bytes for digest in self.files.values())


class Found(NamedTuple):
    """A complete checkpoint."""

    folder: Path
    manifest: Manifest


class Wrong(NamedTuple):
    """Why a directory is no complete checkpoint."""

    file: str
    difference: str


def write(folder: Path, manifest: Manifest) -> None:
    """Completes a checkpoint. Everything else in `folder` is on disk already."""
    content = {
        "schema": SCHEMA,
        **manifest._asdict(),
        "finite": not manifest.nonfinite,
        "files": {name: digest._asdict() for name, digest in manifest.files.items()},
    }
    files.write_new(folder / MANIFEST, checksummed_json.dumps(content))


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint; BadManifest if missing, torn, altered or of another schema."""
    try:
        content = checksummed_json.read(folder / MANIFEST)
    except OSError as error:
        raise BadManifest(f"{MANIFEST} cannot be read ({error.strerror})") from None
    except ChecksumError as error:
        raise BadManifest(f"{MANIFEST} {error}") from None
    if content.pop("schema", None) != SCHEMA:
        raise BadManifest(f"{MANIFEST} is of a schema this version does not know: upgrade healcore")
    content.pop("finite", None)
    try:
        listed = {_inside(name): Digest(**digest) for name, digest in content.pop("files").items()}
        nonfinite = tuple(content.pop("nonfinite"))
        content.setdefault("unnamed", int(len(nonfinite) >= _ONCE_KEPT))
        record = Manifest(files=listed, nonfinite=nonfinite, **content)
    except (TypeError, KeyError, AttributeError):
        raise BadManifest(f"{MANIFEST} lacks a field") from None
    if not listed:
        raise BadManifest(f"{MANIFEST} lists no file")
    wrong = [field for field, holds in _RULES.items() if not holds(getattr(record, field))]
    if wrong:
        raise BadManifest(f"{MANIFEST} has a {wrong[0]} that healcore does not write")
    return record


def _count(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < 1 << 63


_RULES: dict[str, Callable[[Any], bool]] = {
    "step": _count,
    "created": lambda value: type(value) in (int, float) and abs(value) < 1 << 40,
    "save": lambda value: _count(value, 1),
    "writer": lambda value: isinstance(value, str),
    "format": lambda value: isinstance(value, str),
    "files": lambda value: all(
        _count(each.bytes) and re.fullmatch("[0-9a-f]{32}", str(each.xxh3_128))
        for each in value.values()
    ),
    "arrays": _count,
    "nonfinite": lambda value: all(isinstance(name, str) for name in value),
    "healing": lambda value: isinstance(value, bool),
    "unnamed": _count,
}
"""Field of a manifest -> whether it has a value that a store writes. Digests are no secret, so
somebody else may have written the file."""


def _inside(name: str) -> str:
    """The name; BadManifest if it leads to a file outside the checkpoint, or to no file."""
    path = PurePosixPath(name)
    outside = path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts
    if outside or "\0" in name or not _encodes(name):
        raise BadManifest(f"{MANIFEST} lists a file outside the checkpoint: {name!a:.200}")
    return name


def _encodes(name: str) -> bool:
    try:
        return bool(os.fsencode(name))
    except UnicodeError:
        return False


def missing_or_resized(folder: Path, manifest: Manifest) -> Wrong | None:
    """The first file that is missing or has another size; reads no data."""
    for name, digest in manifest.files.items():
        try:
            found = (folder / name).lstat()
        except OSError as error:
            return Wrong(name, f"cannot be found ({error.strerror})")
        if not stat.S_ISREG(found.st_mode):
            return Wrong(name, "is no file any more")
        if found.st_size != digest.bytes:
            return Wrong(name, f"has {found.st_size} bytes, {digest.bytes} were written")
    return None


def first_difference(found: Found, names: Iterable[str]) -> Wrong | None:
    """The first file that is missing or resized, or of `names` not what was written."""
    resized = missing_or_resized(found.folder, found.manifest)
    return resized or next(iter(differences(found, names)), None)


def differences(found: Found, names: Iterable[str]) -> list[Wrong]:
    """Recomputes digests; those of the files `names` that are not what was written."""

    def wrong(name: str) -> Wrong | None:
        try:
            now = file_digest(found.folder / name)
        except OSError as error:
            return Wrong(name, f"cannot be read ({error.strerror})")
        if now != found.manifest.files[name]:
            return Wrong(name, DIFFERS)
        return None

    results = mapped(wrong, list(names), found.manifest.bytes)
    return [each for each in results if each is not None]


def saved(folder: Path, manifest: Manifest, nonfinite_ok: Collection[str]) -> Saved:
    """The checkpoint as `steps` lists it; `nonfinite_ok` has patterns of array names."""
    bad = disallowed(manifest.nonfinite, nonfinite_ok)
    return Saved(
        step=manifest.step,
        status=read_status(folder),
        finite=not bad and not manifest.unnamed,
        bytes=manifest.bytes,
        created=manifest.created,
        healing=manifest.healing,
        path=str(folder),
        nonfinite=bad,
    )


def write_status(folder: Path, status: Status) -> None:
    """Sets the status; a crash leaves the old one or the new one."""
    files.replace(folder / STATUS, checksummed_json.dumps({"schema": SCHEMA, "status": status}))


def read_status(folder: Path) -> Status:
    """The status. Without an intact status file the checkpoint is not verified: a candidate."""
    return stated(folder) or "candidate"


def stated(folder: Path) -> Status | None:
    """The status, None if its file is missing or damaged."""
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
    """The step in a directory's name; None for any other name."""
    found = _STEP.fullmatch(folder.name)
    return int(found[1]) if found else None


def complete(root: Path) -> dict[int, list[Found]]:
    """Complete checkpoints by step, ascending; of one step the newest save first.

    Complete means that the manifest's own digest is right and every file in it is there at its
    size. The content of the files is not read.
    """
    found: dict[int, list[Found]] = {}
    for folder in _folders(root):
        checked = _check(folder)
        if isinstance(checked, Found):
            found.setdefault(checked.manifest.step, []).append(checked)
    for saves in found.values():
        saves.sort(key=lambda each: (-each.manifest.save, each.folder.name))
    return dict(sorted(found.items()))


def incomplete(root: Path) -> list[tuple[Path, Wrong]]:
    """Directories with a checkpoint's name that are no complete one, and why."""
    checked = [(folder, _check(folder)) for folder in _folders(root)]
    # One that has gone in the meantime was being deleted.
    return [(at, wrong) for at, wrong in checked if isinstance(wrong, Wrong) and at.exists()]


def counting(root: Path) -> dict[int, Found]:
    """The save that counts for each step, ascending."""
    return {step: newest(saves) for step, saves in complete(root).items()}


def newest(saves: list[Found]) -> Found:
    """The newest save of one step that is not quarantined; the newest if all are."""
    for each in saves:
        if read_status(each.folder) != "quarantined":
            return each
    return saves[0]


def problems(root: Path) -> list[str]:
    """Everything in a store that a person might want to look at."""
    found = [
        f"{folder.name} is no complete checkpoint: {wrong.file} {wrong.difference}"
        for folder, wrong in incomplete(root)
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
    """Files that the manifest does not list, and a damaged status file."""
    folder = checkpoint.folder
    extra = set(files.below(folder)) - {MANIFEST, STATUS} - set(checkpoint.manifest.files)
    found = [
        f"{folder.name} has a file that its manifest does not know: {x}" for x in sorted(extra)
    ]
    if os.path.lexists(folder / STATUS):
        try:
            checksummed_json.read(folder / STATUS)
        except (OSError, ChecksumError):
            found.append(f"{folder.name} has a damaged {STATUS}: it counts as not yet verified")
    return found


def _folders(root: Path) -> list[Path]:
    return [root / name for name in _names(root) if step_of(root / name) is not None]


def _names(root: Path) -> list[str]:
    """Everything in a store, sorted; StoreError if it cannot be read."""
    try:
        return sorted(os.listdir(root))
    except OSError as error:  # an empty list would look like a run without checkpoints
        raise StoreError(f"{root} cannot be read: {error.strerror}") from error


def _check(folder: Path) -> Found | Wrong:
    try:
        record = read(folder)
    except BadManifest as error:
        file, _, difference = str(error).partition(" ")
        return Wrong(file, difference)
    if record.step != step_of(folder):
        return Wrong(MANIFEST, f"is of step {record.step}")
    return missing_or_resized(folder, record) or Found(folder, record)
