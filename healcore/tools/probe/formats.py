"""Recognizes the format of a checkpoint and opens its contents. Writes nothing, takes no lock."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from healcore import adapter_registry, regular_file
from healcore.plugins.checkpoint_contents import Contents, Damaged, ProbeError
from healcore.runtime.store import manifest
from healcore.tools.probe.orbax_arrays import open_orbax
from healcore.tools.probe.result import NothingToProbe

_TORCH_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt", ".tar"}
TRAINING_FACTS = ("global_step", "epoch", "best_val_loss", "best_metric", "use_qlora")
"""Numbers and flags that trainers save with a checkpoint."""
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
    if any(manifest.step_of(folder) is not None for folder in path.iterdir()):
        return _open_store(path, step)
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
    with open(path, "rb", opener=regular_file.opener) as file:
        start = file.read(9)
    # torch writes a zip archive; torch before 1.6 wrote a pickle of protocol 2. A safetensors file
    # has a JSON object after the length of its header.
    if start[:2] == b"PK" or start[:1] == b"\x80" or start[8:] == b"{":
        return adapter_registry.find("torch", "checkpoint_reader").open_file(path)
    raise ProbeError(
        f"{path} is neither a torch checkpoint nor a safetensors file: pass such a file, or the "
        "directory of a checkpoint"
    )


def _open_store(root: Path, step: int | None) -> Contents:
    """Opens one checkpoint of a store."""
    scan = manifest.scan(root)
    saves = scan.complete
    steps = ", ".join(map(str, saves)) or "none"
    if not saves or (step is not None and step not in saves):
        which = "complete checkpoint" if step is None else f"checkpoint of step {step}"
        raise NothingToProbe(f"{root} has no {which}; complete steps: {steps}")
    status = {each.step: each.status for each in manifest.listed(scan, ())}
    good = [at for at in saves if status[at] == "good"]
    chosen = max(good or saves) if step is None else step
    contents = _open_folder(saves[chosen].folder)
    which = f"step {chosen} ({status[chosen]})"
    note = f"{which}; complete steps: {steps}; to probe another, pass --step"
    return contents._replace(notes=(note, *contents.notes))


def _stored_values(folder: Path) -> dict[tuple[str, ...], Any]:
    """Reads the plain values in the state of a checkpoint, such as an optimizer's groups."""
    values = {}
    for file in sorted(folder.glob("state*.json")):
        for name, entry in json.loads(regular_file.read(file)).items():
            values |= dict(_values(entry.get("tree", {}), (name,)))
    return values


def _values(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not isinstance(node, dict):
        yield path, node
        return
    for tag, content in node.items():
        if tag == "float":
            yield path, float(content)
        elif tag in ("dict", "list", "tuple"):
            for key, part in content if tag == "dict" else enumerate(content):
                yield from _values(part, (*path, *str(key).split(".")))


def _open_folder(path: Path) -> Contents:
    if manifest.step_of(path) is not None and (path / manifest.DATA).is_dir():
        contents = _open_folder(path / manifest.DATA)
        return contents._replace(values={**_stored_values(path), **contents.values})
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
            f"{folder} contains no checkpoint of a known format: no torch or safetensors file, "
            "no DCP or Orbax checkpoint, no healcore store"
        )
    return Contents(
        " and ".join(dict.fromkeys(part.format for part in parts)),
        [array for part in parts for array in part.arrays],
        {keys: value for part in parts for keys, value in part.values.items()},
        (*notes, *(note for part in parts for note in part.notes)),
    )


def _checkpoint_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_file() and (path.suffix in _TORCH_SUFFIXES or path.suffix == ".safetensors"):
            yield path


def damaged_archives(path: Path) -> list[str] | None:
    """Checks the CRC-32 of every record in archives of `torch.save`.

    torch may read wrong values from a damaged archive. Returns None if there is no archive.
    """
    damage, archives = [], 0
    for file in [path] if path.is_file() else _checkpoint_files(path):
        if file.suffix == ".distcp" or not zipfile.is_zipfile(file):
            continue
        archives += 1
        try:
            with zipfile.ZipFile(file) as archive:
                record = archive.testzip()
            problem = record and f"{record} is damaged: its CRC-32 differs"
        except Exception as error:  # a flipped bit makes zipfile and zlib raise any exception
            problem = f"the archive is damaged: {error}"
        if problem:
            damage.append(f"{file.name}: {problem}")
    return damage if archives else None
