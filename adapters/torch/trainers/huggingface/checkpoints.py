"""Finds the newest checkpoint of a transformers Trainer that a run can resume from."""

from __future__ import annotations

import json
import os
import re
import zipfile
from pathlib import Path
from typing import Literal, TypeAlias

from healcore import regular_file
from healcore.console import warning
from healcore.runtime.store.ranks import Alone, Ranks, run_on_first
from healcore.torch.store.gloo import GlooRanks, is_distributed
from healcore.torch.trainers.huggingface.trainer_internals import HfTrainer

_NAME = re.compile(r"checkpoint-(\d+)$")
_STATE = "trainer_state.json"
Requested: TypeAlias = str | os.PathLike[str] | Literal[True]
"""The path of a checkpoint, or True for the newest checkpoint in `output_dir`."""


def step_of(requested: Requested, folder: Path) -> int | None:
    """The step of a checkpoint of the Trainer, by the name of its directory.

    Args:
        requested: argument `resume_from_checkpoint` of `Trainer.train`; True for the newest.
        folder: `output_dir` of the Trainer.

    Returns:
        The number of optimizer steps, or None without a directory of such a name.
    """
    if requested is True:
        paths = _checkpoints_in(folder)
        if not paths:
            return None
        requested = paths[-1]
    name = _NAME.search(os.fspath(requested).rstrip("/"))
    if name is None:
        return None
    return int(name[1])


def output_folder(trainer: HfTrainer) -> Path:
    """The directory in which the Trainer writes its checkpoints."""
    return Path(trainer.args.output_dir or "trainer_output")


def to_resume_from(requested: Requested, folder: Path) -> Requested | None:
    """The checkpoint to resume from: `requested`, or an older one if that is damaged.

    Args:
        requested: argument `resume_from_checkpoint` of `Trainer.train`; True for the newest.
        folder: `output_dir` of the Trainer. A checkpoint elsewhere is not examined.

    Returns:
        An argument for `Trainer.train`; None if no checkpoint can be used.
    """
    found = _checkpoints_in(folder)
    if requested is not True:
        names = [path.absolute() for path in found]
        if Path(requested).absolute() not in names:
            return requested
        found = found[: names.index(Path(requested).absolute()) + 1]
    ranks: Ranks = Alone()
    if is_distributed():
        ranks = GlooRanks()
    target, defects = run_on_first(ranks, lambda: _newest_complete(found))
    for path, defect in defects.items():
        warning(f"the run does not resume from {path}: {defect}")
    if target is None and defects:
        warning(f"{folder} has no good checkpoint: training starts at step 0")
        return None
    if target is None:
        return requested
    return str(target)


def _checkpoints_in(folder: Path) -> list[Path]:
    """The directories of the Trainer's checkpoints, the newest last."""
    paths = [path for path in folder.glob("*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(paths, key=lambda path: int(path.name.rpartition("-")[2]))


def _newest_complete(checkpoints: list[Path]) -> tuple[Path | None, dict[Path, str]]:
    """The newest checkpoint without a defect, or None, and the defects of newer checkpoints."""
    defects: dict[Path, str] = {}
    files: dict[Path, set[str]] = {}
    for path in checkpoints:
        files[path] = {each.name for each in path.iterdir()}
    for path in reversed(checkpoints):
        others = [names for other, names in files.items() if other != path]
        missing: set[str] = set()
        if others:
            missing = set.intersection(*others) - files[path]
        if missing:
            defect = f"it has no {min(missing)}"
        else:
            defect = _defect(path)
        if not defect:
            return path, defects
        defects[path] = defect
    return None, defects


def _defect(path: Path) -> str:
    """Reason why a checkpoint cannot be resumed from, or an empty string."""
    try:
        json.loads(regular_file.read(path / _STATE))
    except (OSError, ValueError):
        return f"incomplete: it has no complete {_STATE}, which the Trainer writes last"
    for file in sorted(path.iterdir()):
        try:
            if file.suffix == ".safetensors":
                if name := _first_nan(file):
                    return f"NaN in {name}"
            elif file.suffix in (".pt", ".pth") or file.name == "pytorch_model.bin":
                # torch writes zip archives. Their directory is at the end, which a cut removes.
                zipfile.ZipFile(file).close()
        except Exception as error:
            return f"its {file.name} cannot be read: {type(error).__name__}: {error}"
    return ""


def _first_nan(file: Path) -> str:
    """Name of the first tensor with NaN in a safetensors file, or an empty string."""
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 -- not a mapping
            tensor = tensors.get_tensor(name)
            if tensor.is_floating_point() and tensor.isnan().any():
                return name
    return ""
