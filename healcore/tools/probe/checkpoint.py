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
from healcore.runtime.store.checkpoints import CheckpointInfo, StoreError, disallowed
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
    """Runs the probe in the current process, without limits. Raises any exception for damage."""
    if not path.exists():
        raise ProbeError(f"{path}: no such file or directory")
    is_store = path.is_dir() and any(
        manifest.step_of(folder) is not None for folder in (path, *path.iterdir())
    )
    return (_probe_store if is_store else _probe_other)(path, inputs)


# -- a checkpoint that was not written by a healcore store -----------------------------------------


def _probe_other(path: Path, inputs: CheckpointInputs) -> ProbeResult:
    damage = damaged_archives(path)
    checks = []
    facts = {"known_good": None}
    notes = ()
    try:
        contents = open_contents(path)
        found = _count_nonfinite(contents)
    except ProbeError as error:
        if not damage:
            raise
        checks.append(Check("readable", ERROR, str(error)))
    else:
        number, notes = len(contents.arrays), contents.notes
        if not number:
            raise NothingToProbe(f"{path} is a {contents.format} without arrays")
        bad = disallowed(found, inputs.nonfinite_ok)
        message = f"no NaN and no Inf in {number} arrays"
        if bad:
            message = f"NaN or Inf in {len(bad)} of {number} arrays: {first_of(bad)}; if they "
            message += "are meant, as in a mask: --nonfinite-ok NAME"
        checks.append(Check("finite", FAIL if bad else PASS, message, len(bad), 0))
        facts |= {"format": contents.format, "arrays": number, "nonfinite": found}
    if damage is None:
        message = "not known: only archives of torch and healcore stores have digests"
        checks.append(Check("digests", SKIP, message, decides=False))
    else:
        message = first_of(damage, separator="; ") or "the CRC-32 of all records match"
        checks.append(Check("digests", FAIL if damage else PASS, message, len(damage), 0))
    message = "not known: only a healcore store records the health of later steps"
    checks.append(Check("known_good", SKIP, message, decides=inputs.require_good))
    return ProbeResult("checkpoint", str(path), tuple(checks), facts, notes)


def _count_nonfinite(contents: Contents) -> dict[str, int]:
    """Counts NaN and Inf by array, in floating-point arrays with any."""
    nonfinite: dict[str, int] = {}
    seen = set()
    for path, array in contents.arrays.items():
        shared = array.storage is not None and array.storage in seen
        seen.add(array.storage)
        if not shared and not array.dtype.startswith(("int", "uint", "bool")):
            bad = int(np.count_nonzero(~np.isfinite(array.read())))
            nonfinite |= {".".join(path): bad} if bad else {}
    return nonfinite


# -- a healcore store, or one checkpoint of it -----------------------------------------------------


def _probe_store(path: Path, inputs: CheckpointInputs) -> ProbeResult:
    is_checkpoint = manifest.step_of(path) is not None
    root = path.parent if is_checkpoint else path

    def wanted(folder: Path) -> bool:
        of_step = inputs.step is None or manifest.step_of(folder) == inputs.step
        return of_step and (not is_checkpoint or folder.name == path.name)

    try:
        scan = manifest.scan(root)
    except StoreError as error:
        raise ProbeError(str(error)) from None
    broken = [each for each in scan.damaged if wanted(Path(each.path))]
    rows: list[dict[str, Any]] = []
    damage, bad, good = [], [], []
    listed = manifest.listed(scan, inputs.nonfinite_ok)
    for saved, found in zip(listed, scan.complete.values(), strict=True):
        if not wanted(found.folder):
            continue
        errors = manifest.find_damage(found)
        row = {name: getattr(saved, name) for name in ("step", "status", "finite")}
        row |= {"intact": not errors, "bytes": saved.bytes, "path": saved.path}
        rows.append(row)
        damage += [f"step {saved.step}: {each.file} {each.difference}" for each in errors]
        if not saved.finite:
            bad.append(saved)
        elif saved.status == "good" and not errors:  # a run could roll back to the checkpoint
            good.append(saved.step)
    damage += [f"{Path(each.path).name}: {each.file} {each.difference}" for each in broken]
    if not rows and not broken:
        which = "" if inputs.step is None else f" of step {inputs.step}"
        raise NothingToProbe(f"{path} contains no checkpoint{which}")
    damaged = len(broken) + sum(not row["intact"] for row in rows)
    whole = f"all {counted(len(rows), 'checkpoint')}: every file has its recorded digest"
    message = first_of(damage, separator="; ") or whole
    digests = Check("digests", FAIL if damage else PASS, message, damaged, 0)
    checks = digests, _finite(bad, good), _known_good(rows, good, inputs)
    facts = {"format": "store of healcore", "checkpoints": rows, "known_good": bool(good)}
    facts["newest_good"] = good[-1] if good else None
    return ProbeResult("checkpoint", str(path), checks, facts)


def _finite(bad: Sequence[CheckpointInfo], good: Sequence[int]) -> Check:
    """Judges the checkpoints with NaN or Inf; `good` are the steps that a run could restore."""
    if not bad:
        return Check("finite", PASS, "no NaN and no Inf were recorded at the save", 0, 0)
    names = ", ".join(bad[0].nonfinite[:3]) or "more arrays than are listed"
    more = f"; and in {len(bad) - 1} more checkpoints" if len(bad) > 1 else ""
    allow = "if the run allows it: --nonfinite-ok NAME"
    message = f"NaN or Inf in step {bad[0].step}: {names}; {allow}{more}"
    return Check("finite", WARN if good else FAIL, message, len(bad), 0)


def _known_good(
    rows: Sequence[Mapping[str, Any]], good: Sequence[int], inputs: CheckpointInputs
) -> Check:
    marked = any(row["status"] == "good" for row in rows)
    verdict = PASS if good else FAIL if marked or inputs.require_good else WARN
    message = "none yet: a checkpoint becomes known-good after healthy steps"
    if good:
        message = f"{len(good)} of {len(rows)} checkpoints; the newest is step {good[-1]}"
    elif marked:
        message = "every known-good checkpoint is damaged"
    return Check("known_good", verdict, message, len(good), 1)
