"""Records which `checkpoint-N` folders of a transformers Trainer are good, and moves bad ones.

A checkpoint is a candidate until `probation` healthy steps have followed it; then it is known-good.
A bad candidate is moved into the folder `_healcore`. `get_last_checkpoint`, `save_total_limit` and
uploads to the Hub ignore that folder. This module never deletes a checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from healcore import console, regular_file
from healcore.runtime.checkpoints.catalog import probation_passed
from healcore.runtime.store import Saved, files

FOLDER = "_healcore"
"""Quarantine folder in output_dir. Uploads to the Hub ignore names that begin with `_`."""

RECORD = "healcore.json"
"""Name of the file in each checkpoint folder that holds its `Record`."""

_NAME = re.compile(r"checkpoint-(\d+)$")
_STATE = "trainer_state.json"
_PART = re.compile(r"(adapter_|pytorch_)?model|optimizer|scheduler|rng_state|scaler")
"""Beginning of the name of a file or folder from which the Trainer resumes."""


class Record(NamedTuple):
    """The content of `healcore.json`."""

    step: int
    status: Literal["candidate", "good", "quarantined"]
    in_trouble: bool = False
    """Whether it was saved during an incident other than non-finite losses or gradients."""
    why: str = ""
    """Reason for the quarantine, or an empty string."""
    files: dict[str, int] = {}  # noqa: RUF012 -- never changed
    """Relative path of each file from which the Trainer resumes -> its size after the save."""


class TrainerCheckpoints:
    """The checkpoints of one run in a Trainer's output_dir. Only one process writes.

    Args:
        folder: folder in which the Trainer saves: output_dir, or a trial's folder in it.
        probation: number of healthy steps after which a checkpoint is known-good.
        writes: whether this rank moves checkpoints and writes records; True on one rank only.
    """

    def __init__(self, folder: Path, *, probation: int, writes: bool) -> None:
        self._folder = folder
        self._probation = probation
        self._writes = writes
        records = map(read_record, list_checkpoints(folder))
        self._records = {record.step: record for record in records if record}
        self.quarantined: list[int] = []
        """Steps of the checkpoints that this run has quarantined."""

    @property
    def last_good(self) -> int | None:
        """Step of the newest known-good checkpoint, or None."""
        return max((r.step for r in self._existing() if r.status == "good"), default=None)

    def path(self, step: int) -> Path:
        """The folder of a checkpoint."""
        return self._folder / f"checkpoint-{step}"

    def add(self, step: int, *, in_trouble: bool) -> None:
        """Records a checkpoint that the Trainer has just saved."""
        self._put(Record(step, "candidate", in_trouble, files=_sizes(self.path(step))))

    def mark_good(self, unhealthy: Iterable[int], next_step: int) -> list[int]:
        """Marks the candidates that have passed probation, and returns their steps.

        `unhealthy` steps do not count towards probation. Does not read the disk, because it runs
        after every step.
        """
        candidates = [
            Saved(r.step, "candidate", True, 0, 0.0, True, None)
            for r in self._records.values()
            if r.status == "candidate" and r.step <= next_step
        ]
        if not candidates:
            return []
        passed = probation_passed(
            candidates, unhealthy=unhealthy, now=next_step, probation=self._probation
        )
        for step in passed:
            self._put(self._records[step]._replace(status="good"))
        return passed

    def keep_last_good(self) -> None:
        """Prevents `save_total_limit` from deleting the newest known-good checkpoint.

        The Trainer deletes the least recently modified folders, so this method touches the folder.
        """
        step = self.last_good
        if step is not None and self._writes:
            os.utime(self.path(step))

    def quarantine(self, since: int, why: str) -> list[tuple[Path, Path]]:
        """Moves candidates saved after step `since` to `_healcore`; returns (old, new) folders."""
        moved = []
        for record in self._existing():
            if record.status == "candidate" and record.step > since:
                path = self.path(record.step)
                del self._records[record.step]
                self.quarantined.append(record.step)
                moved.append((path, move_to_quarantine(path, why) if self._writes else path))
        return moved

    def _existing(self) -> list[Record]:
        """Records of the checkpoints that still exist, in the order of their steps."""
        self._records = {s: r for s, r in self._records.items() if self.path(s).is_dir()}
        return [self._records[step] for step in sorted(self._records)]

    def _put(self, record: Record) -> None:
        self._records[record.step] = record
        if self._writes:
            _write(self.path(record.step), record)


# -- before training ------------------------------------------------------------------------------


def list_checkpoints(folder: Path) -> list[Path]:
    """The Trainer's checkpoints in a folder, in the order of their steps."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(paths, key=_step)


def read_record(path: Path) -> Record | None:
    """The record of a checkpoint, or None if it is missing or unreadable."""
    try:
        data = json.loads(regular_file.read(path / RECORD))
        return Record(**{name: data[name] for name in Record._fields if name in data})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def resume_target(
    folder: Path, nonfinite_ok: frozenset[str] = frozenset()
) -> tuple[Path | None, dict[Path, str]]:
    """Returns the newest checkpoint to resume from, or None, and the defects of newer checkpoints.

    A candidate that was saved in trouble is used only if no better checkpoint exists.
    """
    defects: dict[Path, str] = {}
    in_trouble: Path | None = None
    for path in reversed(list_checkpoints(folder)):
        record = read_record(path)
        if defect := find_defect(path, nonfinite_ok):
            defects[path] = defect
        elif record is not None and record.in_trouble and record.status == "candidate":
            in_trouble = in_trouble or path
            defects[path] = "saved while the model was getting worse"
        else:
            return path, defects
    if in_trouble is None:
        return None, defects
    return in_trouble, {p: why for p, why in defects.items() if _step(p) > _step(in_trouble)}


def find_defect(path: Path, nonfinite_ok: frozenset[str] = frozenset()) -> str:
    """Reason why a checkpoint cannot be resumed from, or an empty string.

    NaN and Inf are allowed in tensors named in `nonfinite_ok`; see `nonfinite_tensors`.
    """
    try:
        json.loads(regular_file.read(path / _STATE))
    except OSError:
        return f"incomplete: it has no {_STATE}, which the Trainer writes last"
    except ValueError:
        return f"incomplete: its {_STATE} is truncated"
    record = read_record(path)
    if record is not None and record.status == "quarantined":
        return record.why
    sizes, older = (
        _sizes(path),
        [p for p in list_checkpoints(path.parent) if _step(p) < _step(path)],
    )
    # Without sizes (an unhealed run), the checkpoint has the files of the checkpoint before it.
    saved = (record and record.files) or dict.fromkeys(_sizes(older[-1]) if older else (), 0)
    for name, size in saved.items():
        if sizes.get(name, -1) < size:
            return f"incomplete: {name} is missing or truncated"
    for file in sorted(path.iterdir()):
        try:
            if file.suffix == ".safetensors":
                if name := _nonfinite(file, nonfinite_ok):
                    return f"NaN or Inf in {name}"
            elif file.suffix in (".pt", ".pth", ".bin") and file.name in sizes:
                # torch writes zip archives. Their directory is at the end, which a cut removes.
                zipfile.ZipFile(file).close()
        except Exception as error:
            return f"its {file.name} cannot be read: {type(error).__name__}: {error}"
    return ""


def _sizes(path: Path) -> dict[str, int]:
    """Relative paths of the files in a checkpoint from which the Trainer resumes, with sizes."""
    parts = [part for part in path.iterdir() if _PART.match(part.name)] if path.is_dir() else []
    files_in = (file for part in parts for file in (part, *part.rglob("*")) if file.is_file())
    return {str(file.relative_to(path)): file.stat().st_size for file in files_in}


def nonfinite_tensors(model: torch.nn.Module) -> frozenset[str]:
    """Names of the tensors in a model that hold NaN or Inf, such as an attention mask of -Inf."""
    return frozenset(
        name
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor) and not value.is_meta and not _finite(value)
    )


def move_to_quarantine(path: Path, why: str) -> Path:
    """Moves a checkpoint to `_healcore`, and returns its new folder."""
    _write(path, Record(_step(path), "quarantined", why=why))
    folder = path.parent / FOLDER
    folder.mkdir(exist_ok=True)
    new = folder / path.name
    if new.exists():
        new = folder / f"{path.name}.{time.time_ns()}"
    path.rename(new)
    return new


def _write(path: Path, record: Record) -> None:
    if not path.is_dir():
        return
    modified = path.stat()
    try:
        content = json.dumps({"schema": 1, **record._asdict()}, indent=2)
        files.replace(path / RECORD, f"{content}\n".encode("ascii"))
        # The Trainer orders checkpoints by the modification times of their folders.
        os.utime(path, ns=(modified.st_atime_ns, modified.st_mtime_ns))
    except OSError as error:  # a full disk must not end the training
        console.warning(f"the record of {path} could not be written: {error}")


def _finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _nonfinite(file: Path, nonfinite_ok: frozenset[str]) -> str:
    """The first tensor of a safetensors file with NaN or Inf that is not in `nonfinite_ok`."""
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 -- not a mapping
            if name not in nonfinite_ok and not _finite(tensors.get_tensor(name)):
                return name
    return ""


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])
