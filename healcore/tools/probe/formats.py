"""Recognizes the format of a checkpoint and opens its contents. Writes nothing, takes no lock."""

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

_TORCH_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt", ".tar"}
TRAINING_FACTS = ("global_step", "epoch", "best_val_loss", "best_metric", "use_qlora")
"""Numbers and flags that trainers save with a checkpoint."""
_MAX_UNPACKED_RATIO = 16
"""Largest allowed ratio of unpacked to packed size; TorchScript compresses its source text."""
_MAX_JSON_BYTES = 1 << 24
"""A `trainer_state.json` is large, because it has an entry for each logged step."""


def open_contents(path: Path, step: int | None = None) -> Contents:
    """Opens a checkpoint.

    Args:
        path: a file of torch or safetensors; a directory of DCP, Orbax, the Hugging Face Trainer
            or Accelerate; a healcore store, or one checkpoint in it (`checkpoints/step-…`).
        step: the checkpoint of a store. By default the newest known-good checkpoint, or the
            newest checkpoint if no checkpoint is known-good.

    Raises:
        ProbeError: the checkpoint cannot be read.
        MissingExtraError: the framework for its format is not installed.
    """
    if not path.exists():
        raise ProbeError(f"{path}: no such file or directory")
    if not path.is_dir():
        return _open_file(path)
    contents = _open_store(path, step)
    if contents is not None:
        return contents
    contents = _open_folder(path)
    return contents._replace(values={**_training_facts(path), **contents.values})


def _training_facts(folder: Path) -> dict[tuple[str, ...], Any]:
    """Reads the values named in `TRAINING_FACTS` from the JSON files of a directory."""
    facts: dict[tuple[str, ...], Any] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(regular_file.read(path, _MAX_JSON_BYTES))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(content, dict):
            for name in TRAINING_FACTS:
                if isinstance(content.get(name), (bool, int, float)):
                    facts[(path.stem, name)] = content[name]
    return facts


def _open_file(path: Path) -> Contents:
    if path.name == ".metadata" or path.suffix == ".distcp":
        return _open_folder(path.parent)
    if path.stat().st_size == 0:
        raise ProbeError(f"{path} is empty")
    if is_safetensors(path):
        return read_safetensors(path)
    with open(path, "rb", opener=regular_file.opener) as file:
        start = file.read(2)
    # torch writes a zip archive; torch before 1.6 wrote a pickle of protocol 2.
    if start == b"PK" or start[:1] == b"\x80":
        return adapter_registry.find("torch", "checkpoint_reader").open_file(path)
    raise ProbeError(
        _advice_for_log(path)
        or f"{path} is neither a torch checkpoint nor a safetensors file: pass such a file, or the "
        "directory of a checkpoint"
    )


def _open_store(root: Path, step: int | None) -> Contents | None:
    """Opens one checkpoint of a store. Returns None if the directory is no store."""
    if not any(manifest.step_of(folder) is not None for folder in root.iterdir()):
        return None
    saves = manifest.current_saves(root)
    if not saves or (step is not None and step not in saves):
        steps = ", ".join(map(str, saves)) or "none"
        which = "complete checkpoint" if step is None else f"checkpoint of step {step}"
        raise NothingToProbe(f"{root} has no {which}; complete steps: {steps}")
    good = [at for at, save in saves.items() if manifest.read_status(save.folder) == "good"]
    chosen = max(good or saves) if step is None else step
    found = saves[chosen]
    contents = open_stored(found.folder, found.manifest.format)
    status = manifest.read_status(found.folder)
    # The note counts checkpoints that the store itself skips.
    complete = [save for same_step in manifest.complete(root).values() for save in same_step]
    quarantined = sum(manifest.read_status(save.folder) == "quarantined" for save in complete)
    incomplete = len(manifest.incomplete(root))
    counts = [f"{quarantined} quarantined"] * bool(quarantined)
    counts += [f"{incomplete} incomplete"] * bool(incomplete)
    others = f" ({', '.join(counts)})" if counts else ""
    number = len(complete) + incomplete
    note = f"step {chosen} ({status}) of {number} checkpoints{others}"
    if max(saves) > chosen:
        note += f"; to probe the newest checkpoint, pass --step {max(saves)}"
    return contents._replace(notes=(note, *contents.notes))


def _open_folder(path: Path) -> Contents:
    if (path / "manifest.json").is_file() and (path / "state.json").is_file():
        try:
            return open_stored(path, manifest.read(path).format)
        except CheckpointDamaged as error:
            raise ProbeError(f"{path}: {error.file} {error.difference}") from None
    if (path / ".metadata").is_file():
        return adapter_registry.find("torch", "checkpoint_reader").open_directory(path)
    if any(path.glob("*.distcp")):
        raise ProbeError(
            f"{path} has shards of torch.distributed.checkpoint, but no .metadata with the list "
            "of their contents: the checkpoint was not written or copied completely"
        )
    if (path / "_METADATA").is_file() or any(path.glob("*/_METADATA")):
        return open_orbax(path)
    steps = sorted((int(item.name), item) for item in path.iterdir() if item.name.isdecimal())
    for _, newest in reversed(steps):
        if newest.is_dir() and any(newest.glob("*/_METADATA")):
            contents = _open_folder(newest)
            return contents._replace(notes=(f"the newest of {len(steps)} steps: {newest.name}",))
    return _open_files(path)


def _open_files(folder: Path) -> Contents:
    """Combines all checkpoint files of a directory: Trainer and Accelerate write several files."""
    parts, notes = [], []
    for path in _checkpoint_files(folder):
        try:
            part = _open_file(path)
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
            _advice_for_log(folder)
            or f"{folder} contains no checkpoint of a known format: no torch or safetensors file, "
            "no DCP or Orbax checkpoint, no healcore store"
        )
    return Contents(
        " and ".join(dict.fromkeys(part.format for part in parts)),
        [array for part in parts for array in part.arrays],
        {keys: value for part in parts for keys, value in part.values.items()},
        (*notes, *(note for part in parts for note in part.notes)),
    )


def _advice_for_log(path: Path) -> str | None:
    """Advice to use the loss probe if the path is a log or a directory of logs, or None."""
    from healcore.tools.traces import open_traces

    traces, _ = open_traces([str(path)])
    if not traces:
        return None
    what = "the log of a run" if len(traces) == 1 else f"the logs of {len(traces)} runs"
    return f"{path} is {what}, not a checkpoint: healcore probe loss {shlex.quote(str(path))}"


def _checkpoint_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_file() and (path.suffix in _TORCH_SUFFIXES or path.suffix == ".safetensors"):
            yield path


# -- zip archives of torch -------------------------------------------------------------------------


class ArchiveCheck(NamedTuple):
    """Number of records in the zip archives of a path, and their damage."""

    records: int
    damage: tuple[str, ...]
    """One message for each damaged archive."""


def check_archives(path: Path) -> ArchiveCheck | None:
    """Checks the CRC-32 of every record in archives of `torch.save`; None without an archive."""
    count, records, damage = 0, 0, []
    for file in [path] if path.is_file() else _checkpoint_files(path):
        with open(file, "rb", opener=regular_file.opener) as opened:
            if file.suffix == ".distcp" or opened.read(2) != b"PK":
                continue
            checked, problem = _check_records(opened)
        count, records = count + 1, records + checked
        if problem:
            damage.append(problem if file == path else f"{file.name}: {problem}")
    return ArchiveCheck(records, tuple(damage)) if count else None


def _check_records(file: BinaryIO) -> tuple[int, str]:
    """Returns the number of records, and the damage or an empty string."""
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            unpacked = sum(record.file_size for record in records)
            if unpacked > _MAX_UNPACKED_RATIO * os.fstat(file.fileno()).st_size + (1 << 20):
                return 0, f"it would unpack to {unpacked} bytes, but torch.save does not compress"
            damaged = archive.testzip()
    except Exception as error:  # a flipped bit makes zipfile and zlib raise any exception
        return 0, f"the archive is damaged: {error}"
    return len(records), f"{damaged} is damaged: its CRC-32 differs" if damaged else ""
