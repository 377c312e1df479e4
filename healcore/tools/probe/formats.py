"""Finds the format of a checkpoint and opens its contents. Writes nothing, takes no lock."""

from __future__ import annotations

import json
import os
import shlex
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from healcore import adapter_registry, regular_file
from healcore.plugins.checkpoint_contents import Contents, Damaged, ProbeError
from healcore.runtime.store import CheckpointDamaged, manifest
from healcore.tools.probe.orbax_arrays import open_orbax
from healcore.tools.probe.result import NothingToProbe
from healcore.tools.probe.safetensors_file import is_safetensors, read_safetensors
from healcore.tools.probe.saved_state import open_stored

_TORCH = {".pt", ".pth", ".bin", ".ckpt", ".tar"}
TRAINING_FACTS = ("global_step", "epoch", "best_val_loss", "best_metric", "use_qlora")
"""Numbers and switches that trainers save with a checkpoint."""
_MOST_PACKED = 16
"""Largest allowed ratio of unpacked to packed size; TorchScript compresses its source text."""
_LARGEST_JSON = 1 << 24
"""Bytes; a `trainer_state.json` has a line for each logged step."""


def open_contents(path: Path, step: int | None = None) -> Contents:
    """Opens a checkpoint.

    Args:
        path: a file of torch or safetensors; a directory of DCP, Orbax, the Hugging Face Trainer
            or Accelerate; a healcore store, or one checkpoint in it (`checkpoints/step-…`).
        step: which checkpoint of a store. By default the newest known-good checkpoint, or the
            newest checkpoint if none is known-good.

    Raises:
        ProbeError: it cannot be read.
        MissingExtraError: the framework that reads it is not installed.
    """
    if not path.exists():
        raise ProbeError(f"{path}: there is no such file or directory")
    if not path.is_dir():
        return _file(path)
    contents = _of_store(path, step)
    if contents is not None:
        return contents
    contents = _folder(path)
    return contents._replace(values={**_training_facts(path), **contents.values})


def _training_facts(folder: Path) -> dict[tuple[str, ...], Any]:
    """The numbers and switches named in `TRAINING_FACTS` of a directory's JSON files, by path."""
    facts: dict[tuple[str, ...], Any] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(regular_file.read(path, _LARGEST_JSON))
        except (OSError, ValueError, RecursionError):
            continue
        given = content if isinstance(content, dict) else {}
        for name in TRAINING_FACTS:
            if isinstance(given.get(name), (bool, int, float)):
                facts[(path.stem, name)] = given[name]
    return facts


def _file(path: Path) -> Contents:
    if path.name == ".metadata" or path.suffix == ".distcp":
        return _folder(path.parent)
    if path.stat().st_size == 0:
        raise ProbeError(f"{path} is empty")
    if is_safetensors(path):
        return read_safetensors(path)
    with open(path, "rb", opener=regular_file.opener) as file:
        start = file.read(2)
    # A zip archive, or a pickle of protocol 2 or later as torch wrote before 1.6.
    if start == b"PK" or start[:1] == b"\x80":
        return adapter_registry.find("torch", "checkpoint_reader").open_file(path)
    raise ProbeError(
        _log(path)
        or f"{path} is neither a torch checkpoint nor a safetensors file: pass such a file, or the "
        "directory of a checkpoint"
    )


def _of_store(root: Path, step: int | None) -> Contents | None:
    """One checkpoint of a store, or None if the directory is no store."""
    if not any(manifest.step_of(each) is not None for each in root.iterdir()):
        return None
    saves = manifest.current_saves(root)
    if not saves or (step is not None and step not in saves):
        there = ", ".join(map(str, saves)) or "none"
        which = "complete checkpoint" if step is None else f"checkpoint of step {step}"
        raise NothingToProbe(f"{root} has no {which}; there: {there}")
    good = [at for at, found in saves.items() if manifest.read_status(found.folder) == "good"]
    newest = max(good or saves) if step is None else step
    found = saves[newest]
    contents = open_stored(found.folder, found.manifest.format)
    status = manifest.read_status(found.folder)
    # The note includes checkpoints that the store itself skips.
    complete = [each for same_step in manifest.complete(root).values() for each in same_step]
    quarantined = sum(manifest.read_status(each.folder) == "quarantined" for each in complete)
    broken = len(manifest.incomplete(root))
    counts = [f"{quarantined} quarantined"] * bool(quarantined)
    counts += [f"{broken} not complete"] * bool(broken)
    others = f" ({', '.join(counts)})" if counts else ""
    number = len(complete) + broken
    note = f"step {newest} ({status}) of {number} checkpoints{others}"
    if max(saves) > newest:
        note += f"; to probe the newest one, pass --step {max(saves)}"
    return contents._replace(notes=(note, *contents.notes))


def _folder(path: Path) -> Contents:
    if (path / "manifest.json").is_file() and (path / "state.json").is_file():
        try:
            return open_stored(path, manifest.read(path).format)
        except CheckpointDamaged as error:
            raise ProbeError(f"{path}: {error.file} {error.difference}") from None
    if (path / ".metadata").is_file():
        return adapter_registry.find("torch", "checkpoint_reader").open_directory(path)
    if any(path.glob("*.distcp")):
        raise ProbeError(
            f"{path} has shards of torch.distributed.checkpoint and no .metadata, the list "
            "of their contents: it was not written or copied completely"
        )
    if (path / "_METADATA").is_file() or any(path.glob("*/_METADATA")):
        return open_orbax(path)
    steps = sorted((int(each.name), each) for each in path.iterdir() if each.name.isdecimal())
    for _, newest in reversed(steps):
        if newest.is_dir() and any(newest.glob("*/_METADATA")):
            contents = _folder(newest)
            return contents._replace(notes=(f"the newest of {len(steps)} steps: {newest.name}",))
    return _files_of(path)


def _files_of(folder: Path) -> Contents:
    """Combines all checkpoint files of a directory: the Trainer and Accelerate write several."""
    parts, notes = [], []
    for path in _files(folder):
        try:
            part = _file(path)
        except Damaged:
            raise
        except ProbeError as error:
            notes.append(str(error))
            continue
        name = path.name.partition(".")[0]
        arrays = [array._replace(path=(name, *array.path)) for array in part.arrays]
        values = {(name, *keys): value for keys, value in part.values.items()}
        parts.append(Contents(part.format, arrays, values, part.notes))
    if not parts:
        if notes:
            raise ProbeError("; ".join(notes))
        raise NothingToProbe(
            _log(folder)
            or f"{folder} holds no checkpoint that healcore knows: no torch or safetensors file, "
            "no DCP or Orbax checkpoint, no healcore store"
        )
    return Contents(
        " and ".join(dict.fromkeys(part.format for part in parts)),
        [array for part in parts for array in part.arrays],
        {keys: value for part in parts for keys, value in part.values.items()},
        (*notes, *(note for part in parts for note in part.notes)),
    )


def _log(path: Path) -> str | None:
    """The advice to use the loss probe, if the path is a log or a directory of logs."""
    from healcore.tools.traces import open_traces

    opened, _ = open_traces([str(path)])
    if not opened:
        return None
    what = "the log of a run" if len(opened) == 1 else f"the logs of {len(opened)} runs"
    return f"{path} is {what}, not a checkpoint: healcore probe loss {shlex.quote(str(path))}"


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_file() and (path.suffix in _TORCH or path.suffix == ".safetensors"):
            yield path


# -- archives of torch -----------------------------------------------------------------------------


class ArchiveCheck(NamedTuple):
    """What was found in the zip archives of a path."""

    records: int
    damage: tuple[str, ...]
    """A sentence about each damaged archive."""


def check_archives(path: Path) -> ArchiveCheck | None:
    """Checks the CRC-32 of every record in the archives of `torch.save` at a path.

    Returns None if the file, or the directory, has no such archive.
    """
    count, records, damage = 0, 0, []
    for file in [path] if path.is_file() else _files(path):
        with open(file, "rb", opener=regular_file.opener) as opened:
            if file.suffix == ".distcp" or opened.read(2) != b"PK":
                continue
            found, why = _check_records(opened)
        count, records = count + 1, records + found
        damage += [why if file == path else f"{file.name}: {why}"] if why else []
    return ArchiveCheck(records, tuple(damage)) if count else None


def _check_records(file: BinaryIO) -> tuple[int, str]:
    """Number of records, and the damage or an empty string."""
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            unpacked = sum(record.file_size for record in records)
            if unpacked > _MOST_PACKED * os.fstat(file.fileno()).st_size + (1 << 20):
                return 0, f"it would unpack to {unpacked} bytes, and torch.save packs nothing"
            damaged = archive.testzip()
    except Exception as error:  # a flipped bit makes zipfile and zlib raise anything
        return 0, f"the archive is damaged: {error}"
    wrong = damaged and f"{damaged} is not what was written: its CRC-32 differs"
    return len(records), wrong or ""
