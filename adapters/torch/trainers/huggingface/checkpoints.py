"""Finds the newest checkpoint of a transformers Trainer that a run can resume from."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

from healcore import regular_file

_NAME = re.compile(r"checkpoint-(\d+)$")
_STATE = "trainer_state.json"


def newest_complete(checkpoints: list[Path]) -> tuple[Path | None, dict[Path, str]]:
    """Returns the newest checkpoint without a defect, or None, and the defects of newer ones."""
    defects: dict[Path, str] = {}
    for path in reversed(checkpoints):
        defect = find_defect(path)
        if not defect:
            return path, defects
        defects[path] = defect
    return None, defects


def list_checkpoints(folder: Path) -> list[Path]:
    """The Trainer's checkpoints in a folder, in the order of their steps."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(paths, key=lambda path: int(path.name.rpartition("-")[2]))


def find_defect(path: Path) -> str:
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
