"""The manifest: what a complete checkpoint consists of. Written last, and never again.

A directory without a valid one is no checkpoint. The status, which does change, lies in a small
file of its own beside it.
"""

from __future__ import annotations

import stat
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import healcore
from healcore.runtime.store import atomic, regular
from healcore.runtime.store.digest import Digest
from healcore.runtime.store.inspection import unmeant
from healcore.runtime.store.protocol import STATUSES, Saved, Status
from healcore.runtime.store.sealed import Unsealed, seal, unseal

SCHEMA = 1
MANIFEST = "manifest.json"
STATUS = "status.json"
STATE = "state.json"
"""Structure of the state and its Python values."""
HEALING = "healing.json"
DATA = "data"
"""Directory of what the framework's own writer wrote."""
_NAMES_KEPT = 1000
_ONCE_KEPT = 20
"""In manifests without `unnamed`: those of healcore before it asked when listing what is meant."""


class BadManifest(ValueError):
    """There is no manifest, or it is not as it was written."""


class Manifest(NamedTuple):
    """A complete checkpoint."""

    step: int
    created: float
    """Wall-clock seconds since 1970."""
    save: int
    """1 for the first save of this step, one more for each further: clocks may jump."""
    writer: str
    format: str
    """"dcp" or "orbax"."""
    files: Mapping[str, Digest]
    """Relative path -> size and digest, of every file but the manifest and the status."""
    arrays: int
    nonfinite: tuple[str, ...]
    """Names of arrays with NaN or Inf, meant or not; the first 1000 are kept."""
    healing: bool
    unnamed: int = 0
    """How many more there are. Nobody can say of those that they are meant."""

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(digest.bytes for digest in self.files.values())


def new(
    *,
    step: int,
    created: float,
    save: int,
    format: str,
    files: Mapping[str, Digest],
    arrays: int,
    nonfinite: tuple[str, ...],
    healing: bool,
) -> Manifest:
    """A manifest by this version of healcore."""
    writer = f"healcore {healcore.__version__}"
    kept = nonfinite[:_NAMES_KEPT]
    unnamed = len(nonfinite) - len(kept)
    return Manifest(step, created, save, writer, format, files, arrays, kept, healing, unnamed)


def write(folder: Path, manifest: Manifest) -> None:
    """Completes a checkpoint. Everything else in `folder` is on disk already."""
    content = {
        "schema": SCHEMA,
        **manifest._asdict(),
        "finite": not manifest.nonfinite,
        "files": {name: digest._asdict() for name, digest in manifest.files.items()},
    }
    atomic.write_new(folder / MANIFEST, seal(content))


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint, its own digest checked.

    Raises:
        BadManifest: missing, torn, altered, or of a schema that this version does not know.
    """
    try:
        content = unseal(regular.read(folder / MANIFEST))
    except OSError as error:
        raise BadManifest(f"{MANIFEST} cannot be read ({error.strerror})") from None
    except Unsealed as error:
        raise BadManifest(f"{MANIFEST} {error}") from None
    if content.pop("schema", None) != SCHEMA:
        raise BadManifest(f"{MANIFEST} is of a schema this version does not know: upgrade healcore")
    content.pop("finite", None)
    try:
        files = {_inside(name): Digest(**digest) for name, digest in content.pop("files").items()}
        if not files:
            raise BadManifest(f"{MANIFEST} lists no file")
        nonfinite = tuple(content.pop("nonfinite"))
        content.setdefault("unnamed", int(len(nonfinite) >= _ONCE_KEPT))
        return Manifest(files=files, nonfinite=nonfinite, **content)
    except (TypeError, KeyError, AttributeError):
        raise BadManifest(f"{MANIFEST} lacks a field") from None


def _inside(name: str) -> str:
    """A path of a manifest; it leads to no file outside the checkpoint.

    Raises:
        BadManifest: it is absolute, or has `..` in it.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts:
        raise BadManifest(f"{MANIFEST} lists a file outside the checkpoint: {name!r:.200}")
    return name


def missing_or_resized(folder: Path, manifest: Manifest) -> tuple[str, str] | None:
    """The first file that is not there or has another size, and which of the two; reads no data."""
    for name, digest in manifest.files.items():
        try:
            found = (folder / name).lstat()
        except OSError as error:
            return name, f"cannot be found ({error.strerror})"
        if not stat.S_ISREG(found.st_mode):
            return name, "is no file any more"
        if found.st_size != digest.bytes:
            return name, f"has {found.st_size} bytes, {digest.bytes} were written"
    return None


def saved(folder: Path, manifest: Manifest, nonfinite_ok: Collection[str]) -> Saved:
    """The checkpoint as `steps` lists it.

    Args:
        folder: where it is.
        manifest: what it is.
        nonfinite_ok: patterns of array names where NaN and Inf are meant.
    """
    bad = unmeant(manifest.nonfinite, nonfinite_ok)
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
    atomic.write(folder / STATUS, seal({"schema": SCHEMA, "status": status}))


def read_status(folder: Path) -> Status:
    """The status. What is missing or damaged says nothing: the checkpoint is not proven."""
    return stated(folder) or "candidate"


def stated(folder: Path) -> Status | None:
    """The status, None if its file is missing or damaged."""
    try:
        status = unseal(regular.read(folder / STATUS)).get("status")
    except (OSError, Unsealed):
        return None
    return status if status in STATUSES else None
