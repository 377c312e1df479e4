"""The checkpoint probe: checks that a checkpoint is intact, finite and known-good.

The probe reads a healcore store with the functions of `runtime.store`, because a store object
would delete stale files. The probe takes no lock, so a run may write at the same time. Other
formats do not record known-good checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from healcore.plugins.checkpoint_contents import Contents, ProbeError, dotted
from healcore.runtime.store import CheckpointDamaged, StoreError, inspection, manifest
from healcore.runtime.store.saved import Saved
from healcore.tools.probe.formats import damaged_archives, open_contents
from healcore.tools.probe.inputs import CheckpointInputs
from healcore.tools.probe.limited_process import probe_paths
from healcore.tools.probe.result import (
    ERROR,
    FAIL,
    PASS,
    SKIP,
    WARN,
    Check,
    NothingToProbe,
    ProbeResult,
    first_three,
)


def probe_checkpoint(path: str | Path, inputs: CheckpointInputs | None = None) -> ProbeResult:
    """Probes a store, one checkpoint of it, or a checkpoint of torch, safetensors, DCP or Orbax.

    The verdict is ERROR if the path cannot be read, SKIP without a checkpoint or an array.
    """
    return probe_paths("checkpoint", judge, [path], inputs or CheckpointInputs())[0]


def judge(path: Path, inputs: CheckpointInputs) -> ProbeResult:
    """Runs the probe in the current process, without limits. Raises any exception for damage."""
    if not path.exists():
        raise ProbeError(f"{path}: no such file or directory")
    is_store = path.is_dir() and any(
        manifest.step_of(folder) is not None for folder in (path, *path.iterdir())
    )
    return (_probe_store if is_store else _probe_other)(path, inputs)


def count_nonfinite(contents: Contents) -> dict[str, int]:
    """Counts NaN and Inf by array, in floating-point arrays with any."""
    nonfinite: dict[str, int] = {}
    seen = set()
    for array in contents.arrays:
        shared = array.storage is not None and array.storage in seen
        seen.add(array.storage)
        if shared or array.dtype.startswith(("int", "uint", "bool")):
            continue
        bad = int(np.count_nonzero(~np.isfinite(array.read())))
        if bad:
            nonfinite[dotted(array.path)] = bad
    return nonfinite


# -- a checkpoint that was not written by a healcore store -----------------------------------------


def _probe_other(path: Path, inputs: CheckpointInputs) -> ProbeResult:
    damage = damaged_archives(path)
    checks, facts, notes = [], {}, ()
    try:
        contents = open_contents(path)
        found = count_nonfinite(contents)
    except ProbeError as error:
        if not damage:
            raise
        checks.append(Check("readable", ERROR, str(error)))
    else:
        number, notes = len(contents.arrays), contents.notes
        if not number:
            raise NothingToProbe(f"{path} is a {contents.format} without arrays")
        bad = inspection.disallowed(found, inputs.nonfinite_ok)
        message = f"no NaN and no Inf in {number} arrays"
        if bad:
            message = f"NaN or Inf in {len(bad)} of {number} arrays: {first_three(bad)}"
        checks.append(Check("finite", FAIL if bad else PASS, message, len(bad), 0))
        facts = {"format": contents.format, "arrays": number, "nonfinite": found}
    if damage is None:
        message = "not known: only archives of torch and healcore stores have digests"
        checks.append(Check("digests", SKIP, message, decides=False))
    elif damage:
        checks.append(Check("digests", FAIL, first_three(damage, "; "), len(damage), 0))
    else:
        checks.append(Check("digests", PASS, "the CRC-32 of all records match", 0, 0))
    message = "not known: only a healcore store records the health of later steps"
    checks.append(Check("known_good", SKIP, message, decides=inputs.require_good))
    facts["known_good"] = None
    return ProbeResult("checkpoint", str(path), tuple(checks), facts, notes)


# -- a healcore store, or one checkpoint of it -----------------------------------------------------


class ProbedCheckpoint(NamedTuple):
    """One checkpoint of a store, with the results of the probe."""

    saved: Saved
    damage: tuple[CheckpointDamaged, ...]

    @property
    def restorable(self) -> bool:
        """Whether a run could roll back to the checkpoint: intact, finite and known-good."""
        return not self.damage and self.saved.finite and self.saved.status == "good"


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
    saved = manifest.listed(scan, inputs.nonfinite_ok)
    probed = [
        ProbedCheckpoint(each, tuple(manifest.find_damage(found, sorted(found.manifest.files))))
        for each, found in zip(saved, scan.complete.values(), strict=True)
        if wanted(found.folder)
    ]
    if not probed and not broken:
        which = "" if inputs.step is None else f" of step {inputs.step}"
        raise NothingToProbe(f"{path} contains no checkpoint{which}")
    checks = (_digests(probed, broken), _finite(probed), _known_good(probed, inputs))
    newest = next((each.saved.step for each in reversed(probed) if each.restorable), None)
    facts = {
        "format": "store of healcore",
        "checkpoints": [_row(each) for each in probed],
        "newest_good": newest,
        "known_good": newest is not None,
    }
    return ProbeResult("checkpoint", str(path), checks, facts)


def _digests(probed: list[ProbedCheckpoint], broken: list[CheckpointDamaged]) -> Check:
    """Compares the digest of every file with the recorded digest."""
    bad = [
        f"step {each.saved.step}: {wrong.file} {wrong.difference}"
        for each in probed
        for wrong in each.damage
    ]
    bad += [f"{Path(each.path).name}: {each.file} {each.difference}" for each in broken]
    number = sum(bool(each.damage) for each in probed) + len(broken)
    if not bad:
        which = f"all {len(probed)} checkpoint{'s' * (len(probed) != 1)}"
        return Check("digests", PASS, f"{which}: every file has its recorded digest", 0, 0)
    return Check("digests", FAIL, first_three(bad, "; "), number, 0)


def _finite(probed: list[ProbedCheckpoint]) -> Check:
    """Checks the arrays for NaN and Inf that `nonfinite_ok` does not allow."""
    bad = [each for each in probed if not each.saved.finite]
    if not bad:
        return Check("finite", PASS, "no NaN and no Inf were recorded at the save", 0, 0)
    first = bad[0].saved
    names = ", ".join(first.nonfinite[:3]) or "more arrays than are listed"
    message = f"NaN or Inf in step {first.step}: {names}; if the run allows it: --nonfinite-ok NAME"
    if len(bad) > 1:
        message += f"; and in {len(bad) - 1} more checkpoints"
    usable = any(each.restorable for each in probed)
    return Check("finite", WARN if usable else FAIL, message, len(bad), 0)


def _known_good(probed: list[ProbedCheckpoint], inputs: CheckpointInputs) -> Check:
    good = [each.saved.step for each in probed if each.restorable]
    if good:
        message = f"{len(good)} of {len(probed)} checkpoints; the newest is step {good[-1]}"
        return Check("known_good", PASS, message, len(good), 1)
    marked = any(each.saved.status == "good" for each in probed)
    message = (
        "every known-good checkpoint is damaged"
        if marked
        else "none yet: a checkpoint becomes known-good after healthy steps"
    )
    return Check("known_good", FAIL if marked or inputs.require_good else WARN, message, 0, 1)


def _row(each: ProbedCheckpoint) -> dict[str, Any]:
    return {
        "step": each.saved.step,
        "status": each.saved.status,
        "finite": each.saved.finite,
        "intact": not each.damage,
        "bytes": each.saved.bytes,
        "path": each.saved.path,
    }
