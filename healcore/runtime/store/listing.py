"""What lies in a store's directory, read anew each time: the disk is the only truth."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from healcore.runtime.store import digest, manifest, names, regular
from healcore.runtime.store.errors import StoreError
from healcore.runtime.store.manifest import BadManifest, Manifest
from healcore.runtime.store.sealed import Unsealed, unseal

HEALER = "healcore."
"""How the files begin that a Healer keeps in the root about its run; no store touches them."""


class Found(NamedTuple):
    """A complete checkpoint."""

    folder: Path
    manifest: Manifest


class Wrong(NamedTuple):
    """What keeps a directory from being one."""

    file: str
    difference: str


def complete(root: Path) -> dict[int, list[Found]]:
    """Complete checkpoints by step, ascending; of one step the newest save first.

    Complete means: a manifest whose own digest holds, and every file in it there at its size. The
    content of the files is not read.
    """
    found: dict[int, list[Found]] = {}
    for folder in _folders(root):
        looked_at = _look(folder)
        if isinstance(looked_at, Found):
            found.setdefault(looked_at.manifest.step, []).append(looked_at)
    for saves in found.values():
        saves.sort(key=lambda each: (-each.manifest.save, each.folder.name))
    return dict(sorted(found.items()))


def incomplete(root: Path) -> list[tuple[Path, Wrong]]:
    """Directories with a checkpoint's name that are none, and why."""
    looked_at = [(folder, _look(folder)) for folder in _folders(root)]
    # One that has gone meanwhile was being deleted.
    return [(at, wrong) for at, wrong in looked_at if isinstance(wrong, Wrong) and at.exists()]


def counting(root: Path) -> dict[int, Found]:
    """The save that counts for each step, ascending."""
    return {step: newest(saves) for step, saves in complete(root).items()}


def newest(saves: list[Found]) -> Found:
    """The newest save of one step that is not quarantined; the newest if all are."""
    for each in saves:
        if manifest.read_status(each.folder) != "quarantined":
            return each
    return saves[0]


def step_of(folder: Path) -> int | None:
    """The step in a directory's name."""
    parsed = names.parse_step(folder.name)
    return parsed.step if parsed else None


def first_difference(found: Found, files: Iterable[str]) -> Wrong | None:
    """Recomputes digests; the first file that is not what it was.

    Args:
        found: the checkpoint.
        files: which of its files.
    """
    resized = manifest.missing_or_resized(found.folder, found.manifest)
    if resized is not None:
        return Wrong(*resized)

    def wrong(name: str) -> Wrong | None:
        try:
            now = digest.file_digest(found.folder / name)
        except OSError as error:
            return Wrong(name, f"cannot be read ({error.strerror})")
        if now != found.manifest.files[name]:
            return Wrong(name, "is not what was written: its digest differs")
        return None

    looked_at = digest.mapped(wrong, list(files), found.manifest.bytes)
    return next((each for each in looked_at if each is not None), None)


def problems(root: Path) -> list[str]:
    """Everything in a store that a person might want to look at. Nothing of it is touched."""
    told = [
        f"{folder.name} is no complete checkpoint: {wrong.file} {wrong.difference}"
        for folder, wrong in incomplete(root)
    ]
    for saves in complete(root).values():
        for each in saves:
            told += _oddities(each)
    for name in _names(root):
        if names.is_temporary(name):
            told += [f"{name} is work of a process that is not known here"] * _stays(name)
        elif names.parse_step(name) is None and not name.startswith(HEALER):
            told.append(f"{name} is nothing of healcore's")
    return told


def _oddities(found: Found) -> list[str]:
    """Files that the manifest does not know, and a status file that cannot be believed."""
    name, known = found.folder.name, set(found.manifest.files)
    there = set(digest.files_below(found.folder)) - {manifest.MANIFEST, manifest.STATUS}
    told = [
        f"{name} has a file that its manifest does not know: {x}" for x in sorted(there - known)
    ]
    status = found.folder / manifest.STATUS
    if os.path.lexists(status):
        try:
            unseal(regular.read(status))
        except (OSError, Unsealed):
            told.append(f"{name} has a damaged {manifest.STATUS}: it counts as not yet proven")
    return told


def _stays(name: str) -> bool:
    """Whether a temporary name is of a place whose processes cannot be seen from here."""
    return f"-{names.place()}-" not in name


def _folders(root: Path) -> list[Path]:
    return [root / name for name in _names(root) if names.parse_step(name) is not None]


def _names(root: Path) -> list[str]:
    """Everything in a store, sorted.

    Raises:
        StoreError: it cannot be read. An empty list would look like a run without checkpoints.
    """
    try:
        return sorted(os.listdir(root))
    except OSError as error:
        raise StoreError(f"{root} cannot be read: {error.strerror}") from error


def _look(folder: Path) -> Found | Wrong:
    try:
        record = manifest.read(folder)
    except BadManifest as error:
        return Wrong(*_split(str(error)))
    if record.step != step_of(folder):
        return Wrong(manifest.MANIFEST, f"is of step {record.step}")
    resized = manifest.missing_or_resized(folder, record)
    return Found(folder, record) if resized is None else Wrong(*resized)


def _split(message: str) -> tuple[str, str]:
    file, _, difference = message.partition(" ")
    return file, difference
