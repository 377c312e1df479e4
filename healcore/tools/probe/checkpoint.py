"""The checkpoint probe: checks that a checkpoint is intact, finite and known-good.

The probe reads a healcore store with the functions of `runtime.store`, because a store object
would delete stale files. The probe takes no lock, so a run may write at the same time. Other
formats do not record known-good checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from healcore.checkpoint_contents import Contents, ProbeError
from healcore.console import counted, first_of
from healcore.runtime.store import manifest
from healcore.runtime.store.checkpoints import CheckpointInfo, disallowed
from healcore.tools.probe.checkpoint_files import damaged_archives, open_contents
from healcore.tools.probe.checks import (
    ERROR,
    FAIL,
    PASS,
    SKIP,
    WARN,
    Check,
    CheckpointInputs,
    NothingToProbe,
    ProbeResult,
)


def probe_checkpoint(path: Path, inputs: CheckpointInputs) -> ProbeResult:
    """Runs the probe in the current process, without limits of memory and time.

    `healcore probe checkpoint` runs it in a child process (`checkpoint_files.probe_paths`), because
    a damaged file can crash the libraries that read it.

    Args:
        path: a file of torch or safetensors, a directory of DCP, Orbax or a trainer, a store of
            healcore, or one checkpoint of a store.
        inputs: which checkpoint of a store to judge, and what the checks allow.

    Returns:
        The checks "finite", "digests" and "known_good", and the checkpoints of a store.

    Raises:
        ProbeError: the path does not exist or cannot be read.
        NothingToProbe: there is no checkpoint, or a checkpoint without arrays.
        Exception: any exception for a damaged file, see `checks.run_probe`.
    """
    if not path.exists():
        raise ProbeError(f"{path}: no such file or directory")
    if path.is_dir():
        for folder in (path, *path.iterdir()):
            if manifest.step_of(folder) is not None:
                return _probe_store(path, inputs)
    return _probe_other(path, inputs)


# -- a checkpoint that was not written by a healcore store -----------------------------------------


def _probe_other(path: Path, inputs: CheckpointInputs) -> ProbeResult:
    """Judges a checkpoint without a manifest by its values, and by the CRC-32 in torch's files."""
    damage = damaged_archives(path)
    checks: list[Check] = []
    facts: dict[str, Any] = {"known_good": None}
    notes: tuple[str, ...] = ()
    try:
        contents = open_contents(path)
        nonfinite = _count_nonfinite(contents)
    except ProbeError as error:
        if not damage:
            raise
        checks.append(Check("readable", ERROR, str(error)))
    else:
        number = len(contents.arrays)
        notes = contents.notes
        if not number:
            raise NothingToProbe(f"{path} is a {contents.format} without arrays")
        bad = disallowed(nonfinite, inputs.nonfinite_ok)
        verdict = PASS
        message = f"no NaN and no Inf in {number} arrays"
        if bad:
            verdict = FAIL
            message = f"NaN or Inf in {len(bad)} of {number} arrays: {first_of(bad)}; if they "
            message += "are meant, as in a mask: --nonfinite-ok NAME"
        checks.append(Check("finite", verdict, message, len(bad), 0))
        facts |= {"format": contents.format, "arrays": number, "nonfinite": nonfinite}
    if damage is None:
        message = "not known: only archives of torch and healcore stores have digests"
        checks.append(Check("digests", SKIP, message, decides=False))
    elif damage:
        message = first_of(damage, separator="; ")
        checks.append(Check("digests", FAIL, message, len(damage), 0))
    else:
        checks.append(Check("digests", PASS, "the CRC-32 of all records match", 0, 0))
    message = "not known: only a healcore store records the health of later steps"
    checks.append(Check("known_good", SKIP, message, decides=inputs.require_good))
    return ProbeResult("checkpoint", str(path), tuple(checks), facts, notes)


def _count_nonfinite(contents: Contents) -> dict[str, int]:
    """Counts NaN and Inf by array, in floating-point arrays with any."""
    nonfinite: dict[str, int] = {}
    seen = set()
    for path, array in contents.arrays.items():
        is_repeated = array.storage is not None and array.storage in seen
        seen.add(array.storage)
        if is_repeated or array.dtype.startswith(("int", "uint", "bool")):
            continue
        count = int(np.count_nonzero(~np.isfinite(array.read())))
        if count:
            nonfinite[".".join(path)] = count
    return nonfinite


# -- a healcore store, or one checkpoint of it -----------------------------------------------------


def _probe_store(path: Path, inputs: CheckpointInputs) -> ProbeResult:
    """Judges the checkpoints of a store by their manifests, and the digests of their files."""
    is_checkpoint = manifest.step_of(path) is not None
    root = path
    if is_checkpoint:
        root = path.parent

    def is_wanted(folder: Path) -> bool:
        if inputs.step is not None and manifest.step_of(folder) != inputs.step:
            return False
        return not is_checkpoint or folder.name == path.name

    try:
        saves, incomplete = manifest.scan(root)
    except OSError as error:
        raise ProbeError(f"{root} cannot be read: {error.strerror}") from None
    broken = [folder for folder in incomplete if is_wanted(Path(folder.path))]
    rows: list[dict[str, Any]] = []
    damage: list[str] = []
    bad: list[CheckpointInfo] = []
    good: list[int] = []
    listed = manifest.listed(saves, inputs.nonfinite_ok)
    for saved, (found, *_) in zip(listed, saves.values(), strict=True):
        if not is_wanted(Path(saved.path or "")):
            continue
        errors = manifest.find_damage(found)
        rows.append(_row(saved, is_intact=not errors))
        for error in errors:
            damage.append(f"step {saved.step}: {error.file} {error.difference}")
        if not saved.finite:
            bad.append(saved)
        elif saved.status == "good" and not errors:  # a run could roll back to the checkpoint
            good.append(saved.step)
    for folder in broken:
        damage.append(f"{Path(folder.path).name}: {folder.file} {folder.difference}")
    if not rows and not broken:
        which = ""
        if inputs.step is not None:
            which = f" of step {inputs.step}"
        raise NothingToProbe(f"{path} contains no checkpoint{which}")
    damaged = len(broken) + sum(not row["intact"] for row in rows)
    digests = _digests(damage, damaged, len(rows))
    checks = (digests, _finite(bad, good), _known_good(rows, good, inputs))
    newest_good = None
    if good:
        newest_good = good[-1]
    facts = {
        "format": "store of healcore",
        "checkpoints": rows,
        "known_good": bool(good),
        "newest_good": newest_good,
    }
    return ProbeResult("checkpoint", str(path), checks, facts)


def _row(saved: CheckpointInfo, *, is_intact: bool) -> dict[str, Any]:
    """One checkpoint of a store, for the JSON document."""
    return {
        "step": saved.step,
        "status": saved.status,
        "finite": saved.finite,
        "intact": is_intact,
        "bytes": saved.bytes,
        "path": saved.path,
    }


def _digests(damage: Sequence[str], damaged: int, checkpoints: int) -> Check:
    """Judges the digests: a text for each damaged file, and the number of damaged checkpoints."""
    if damage:
        return Check("digests", FAIL, first_of(damage, separator="; "), damaged, 0)
    message = f"all {counted(checkpoints, 'checkpoint')}: every file has its recorded digest"
    return Check("digests", PASS, message, damaged, 0)


def _finite(bad: Sequence[CheckpointInfo], good: Sequence[int]) -> Check:
    """Judges the checkpoints with NaN or Inf; `good` are the steps that a run could restore."""
    if not bad:
        return Check("finite", PASS, "no NaN and no Inf were recorded at the save", 0, 0)
    names = ", ".join(bad[0].nonfinite[:3]) or "more arrays than are listed"
    allow = "if the run allows it: --nonfinite-ok NAME"
    message = f"NaN or Inf in step {bad[0].step}: {names}; {allow}"
    if len(bad) > 1:
        message += f"; and in {len(bad) - 1} more checkpoints"
    verdict = FAIL
    if good:
        verdict = WARN
    return Check("finite", verdict, message, len(bad), 0)


def _known_good(
    rows: Sequence[Mapping[str, Any]], good: Sequence[int], inputs: CheckpointInputs
) -> Check:
    """Judges whether the store has a checkpoint that a run could roll back to."""
    is_marked = any(row["status"] == "good" for row in rows)
    if good:
        verdict = PASS
        message = f"{len(good)} of {len(rows)} checkpoints; the newest is step {good[-1]}"
    elif is_marked:
        verdict = FAIL
        message = "every known-good checkpoint is damaged"
    else:
        verdict = WARN
        if inputs.require_good:
            verdict = FAIL
        message = "none yet: a checkpoint becomes known-good after healthy steps"
    return Check("known_good", verdict, message, len(good), 1)
