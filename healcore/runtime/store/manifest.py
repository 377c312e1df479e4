"""The directories of checkpoints: written, listed, verified and removed.

    root/
      step-0000000120.1/               step and attempt of the save
        data/                          arrays, in the files of the framework, or in a small file
        state.json                     structure of the state, Python values
        manifest.json                  size and digest of all files above; the record of the run
      .tmp-healcore-…/                 work in progress: a save, or a checkpoint being deleted

Each change of a directory takes effect by one rename, its commit. A crash before the commit leaves
the old state, and a crash after the commit leaves the new state:

    save      write the files, then the manifest, into .tmp-healcore-…
              rename it to step-….1                                          <- commit
    rollback  write a manifest with the new record to a temporary file
              rename the file to manifest.json                               <- commit
    deletion  rename step-….1 to .tmp-healcore-…                             <- commit
              delete the files

What is renamed is on disk before, see `files`. A directory without a valid manifest is no
checkpoint. Nothing is cached: each function reads the disk.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError

from healcore import regular_file
from healcore.runtime.store import files
from healcore.runtime.store.checkpoints import (
    AttemptHistory,
    CheckpointDamaged,
    CheckpointInfo,
    disallowed,
)
from healcore.runtime.store.files import Digest

MANIFEST = "manifest.json"
STATE = "state.json"
DATA = "data"
"""Directory of the arrays."""
_MAX_BYTES = 1 << 26
"""Largest size of a manifest that is read: enough for half a million files."""
_STEP = re.compile(r"step-(\d{10,})\.[0-9a-f]{1,18}")
"""Other versions of healcore had a random suffix."""
CRAFTED = (
    LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError,
    SafetensorError,
)  # fmt: skip
"""Errors that reading raises if another program wrote a file with the right digest."""


class Manifest(BaseModel, frozen=True, ser_json_inf_nan="constants"):
    """What is known of a save without its arrays; one JSON document on disk.

    Digests are no signature: anybody may have written the file.
    """

    version: Literal[7] = Field(default=7, alias="schema")
    """Version of this class. A manifest of another version is not read."""
    step: Annotated[int, Field(ge=0, lt=1 << 63)]
    """Number of optimizer steps that the state has had."""
    attempt: Annotated[int, Field(ge=1, lt=1 << 63)]
    """Number of the attempt that saved the checkpoint, from 1. See `AttemptHistory`."""
    created: Annotated[float, Field(gt=-(1 << 40), lt=1 << 40)]
    """Wall-clock seconds since 1970."""
    nbytes: Annotated[int, Field(ge=0, lt=1 << 63)]
    """Size of its arrays, or of its files."""
    nonfinite: tuple[str, ...] = ()
    """Names of arrays with NaN or Inf on any rank, allowed or not."""
    files: dict[str, Digest] = {}
    """Relative path -> size and digest, for every file except the manifest."""
    record: dict[str, Any] | None = None
    """The record of the run, or None without one. A rollback replaces it."""


class Saved(NamedTuple):
    """A complete save of a step: in a directory, where its manifest is intact, or in memory.

    That the content of its files is right is checked before a restore, by `find_damage`.
    """

    manifest: Manifest
    folder: Path | None
    """Directory of the checkpoint, or None for a copy in memory."""
    flat: Any = None
    """The state of a copy, a `FlatState` with its arrays in host memory."""

    @property
    def history(self) -> AttemptHistory:
        """The attempts in the record."""
        return AttemptHistory.of(self.manifest.record)

    def changed(self, **values: Any) -> Saved:
        """The save with other values in its manifest."""
        return self._replace(manifest=self.manifest.model_copy(update=values))


def complete(root: Path, folder: Path, manifest: Manifest, entries: Sequence[Any]) -> None:
    """Completes a save: writes the structure and the manifest, and sets the final name.

    Before the final name is set, the checkpoint does not exist. An older save of the same step is
    removed only after it.

    Args:
        root: directory of the run.
        folder: the temporary directory, in which all ranks have written their arrays.
        manifest: what is known of the save, without the files.
        entries: the shared entries, then the per-rank entries of each rank.
    """
    state = json.dumps(entries, separators=(",", ":"), allow_nan=False)
    (folder / STATE).write_bytes(state.encode())
    digests = files.sync_and_digest(folder)
    nbytes = sum(each.bytes for each in digests.values())
    write(folder, manifest.model_copy(update={"files": digests, "nbytes": nbytes}))
    final = root / directory_name(manifest.step, manifest.attempt)
    older = set(folders_of(root, manifest.step)) - {final}
    replaced = files.new_temporary(root)
    if final.exists():  # its files are deleted after the save is complete: that may take long
        files.rename(final, replaced)
    files.rename(folder, final)
    files.discard(replaced)
    for each in older:
        remove(each)


def write(folder: Path, manifest: Manifest) -> None:
    """Writes or replaces the manifest of a checkpoint. A crash leaves the old or the new one."""
    files.replace(folder / MANIFEST, files.seal(manifest.model_dump_json(by_alias=True).encode()))


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


def sweep(root: Path, folders: Sequence[Path] | None = None) -> list[str]:
    """Removes the temporary files of killed processes and of saves that have failed.

    The caller has claimed the directory, and nothing is being written there.

    Args:
        root: directory of the run.
        folders: the checkpoints whose temporary files are removed too. None for all.

    Returns:
        The paths of what was removed, relative to the directory.
    """
    places = [root, *(folders_of(root) if folders is None else folders)]
    found = [each for place in places for each in place.glob(".tmp-healcore-*")]
    found = [each for each in found if files.TEMPORARY.fullmatch(each.name)]
    return [each.relative_to(root).as_posix() for each in found if files.discard(each)]


def directory_name(step: int, attempt: int) -> str:
    """Name of a checkpoint's directory. Ten digits sort as numbers."""
    return f"step-{step:010d}.{attempt}"


def step_of(folder: Path) -> int | None:
    """The step in the name of a checkpoint's directory, or None for any other name."""
    match = _STEP.fullmatch(folder.name)
    if match:
        return int(match[1])
    return None


def folders_of(root: Path, step: int | None = None) -> list[Path]:
    """The folders with the name of a checkpoint, of all steps or of one step.

    Returns:
        Paths, sorted by name.

    Raises:
        OSError: the directory cannot be read: an empty list would look like a run without any.
    """
    if step is None:
        beginning = "step-"
    else:
        beginning = f"step-{step:010d}."
    names = [name for name in sorted(os.listdir(root)) if name.startswith(beginning)]
    return [root / name for name in names if _STEP.fullmatch(name)]


def scan(*roots: Path) -> tuple[dict[int, list[Saved]], list[CheckpointDamaged]]:
    """Looks at every checkpoint in some directories.

    Args:
        roots: the directories of the run, in the order of preference.

    Returns:
        The saves that count, see `counting`, and the errors of directories that have the name of a
        checkpoint and are not complete, if no directory has the checkpoint. A crash leaves none: a
        save gets its name last, a deletion removes it first.

    Raises:
        OSError: a directory cannot be read.
    """
    found: list[Saved] = []
    broken: list[CheckpointDamaged] = []
    for root in roots:
        for folder in folders_of(root):
            try:
                found.append(_open(folder))
            except CheckpointDamaged as error:
                if folder.exists():  # if it is gone, another thread has deleted the checkpoint
                    broken.append(error)
    saves = counting(found)
    return saves, [each for each in broken if each.step not in saves]


def counting(saves: Iterable[Saved]) -> dict[int, list[Saved]]:
    """The saves that count, by step, ascending.

    A directory may have missed saves and replacements of records, because its disk was full or
    away. So for each step the saves of the latest attempt count, and of them the one with the
    newest record comes first.
    """
    found: dict[int, list[Saved]] = {}
    newest = sorted(saves, key=lambda x: (x.manifest.attempt, x.history.recency), reverse=True)
    for each in sorted(newest, key=lambda x: x.manifest.step):
        equal = found.setdefault(each.manifest.step, [])
        if not equal or each.manifest.attempt == equal[0].manifest.attempt:
            equal.append(each)
    return found


def listed(
    saves: Mapping[int, Sequence[Saved]], nonfinite_ok: Sequence[str]
) -> list[CheckpointInfo]:
    """The entry of each step in a list of checkpoints, ascending.

    Args:
        saves: result of `counting`.
        nonfinite_ok: patterns of array names where NaN and Inf are allowed.
    """
    found: list[CheckpointInfo] = []
    for equal in saves.values():
        known, folder, _ = next((each for each in equal if each.folder), equal[0])
        wrong = disallowed(known.nonfinite, nonfinite_ok)
        of_save = known.step, "candidate", known.nbytes, known.created, known.attempt
        found.append(CheckpointInfo(*of_save, str(folder) if folder else None, wrong))
    return AttemptHistory.newest(first.history for first, *_ in saves.values()).with_status(found)


def find_damage(saved: Saved, rank: int = 0, world: int = 1) -> list[CheckpointDamaged]:
    """Recomputes the digests of a rank's share of the files.

    Args:
        saved: a complete checkpoint in a directory.
        rank: number of this rank.
        world: number of ranks, which share the files.

    Returns:
        An error for each damaged file, sorted by name.
    """
    folder, digests = saved.folder or Path(), saved.manifest.files

    def compare(name: str) -> str:
        try:
            if files.digest_of(folder / name) == digests[name]:
                return ""
            return files.DIFFERS
        except (OSError, ValueError) as error:  # ValueError: a byte 0 in the name
            return f"cannot be read ({getattr(error, 'strerror', error)})"

    names = sorted(digests)[rank::world]
    found = files.map_in_threads(compare, names, saved.manifest.nbytes)
    return [damaged(folder, why, name) for name, why in zip(names, found, strict=True) if why]


def _open(folder: Path) -> Saved:
    """Opens a complete checkpoint; CheckpointDamaged if its manifest is damaged."""
    try:
        body = files.unseal(regular_file.read(folder / MANIFEST, _MAX_BYTES))
        manifest = Manifest.model_validate_json(body, strict=True)
    except OSError as error:
        raise damaged(folder, f"cannot be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        why = f"has values that this version does not write: {where!a:.200} ({first['msg']})"
        if where == "schema":
            why = "is of another version of healcore: resume with that version"
        raise damaged(folder, why) from None
    except ValueError as error:
        raise damaged(folder, str(error)) from None
    if folder.name != directory_name(manifest.step, manifest.attempt):
        raise damaged(folder, f"is of step {manifest.step}, attempt {manifest.attempt}")
    return Saved(manifest, folder)


def damaged(folder: Path, difference: str, file: str = MANIFEST) -> CheckpointDamaged:
    """The error for a damaged file in a directory with the name of a checkpoint."""
    return CheckpointDamaged(step_of(folder) or 0, str(folder), file, difference)
