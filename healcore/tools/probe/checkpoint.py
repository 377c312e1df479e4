"""The checkpoint probe: checks that a checkpoint is intact, finite and known-good.

The probe reads a healcore store with the functions of `runtime.store`, because a store object
would delete stale files. The probe takes no lock, so a run may write at the same time. A note lists
checkpoints that the run deletes meanwhile. Other formats do not record known-good checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from healcore.plugins.checkpoint_contents import Contents, ProbeError, dotted
from healcore.runtime.store import (
    CheckpointDamaged,
    StoreError,
    inspection,
    manifest,
)
from healcore.runtime.store.manifest import StoredCheckpoint
from healcore.runtime.store.protocol import Saved
from healcore.tools.probe.formats import ArchiveCheck, check_archives, open_contents
from healcore.tools.probe.inputs import CheckpointInputs
from healcore.tools.probe.limited_process import run_probe
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

    Raises ProbeError if the path cannot be read, NothingToProbe without a checkpoint or an array.
    """
    return run_probe(judge, path, inputs or CheckpointInputs())


def judge(path: Path, inputs: CheckpointInputs) -> ProbeResult:
    """Runs the probe in the current process, without limits."""
    if not path.exists():
        raise ProbeError(f"{path}: no such file or directory")
    return (_probe_store if is_store(path) else _probe_other)(path, inputs)


class FiniteCheck(NamedTuple):
    """NaN and Inf in the arrays of a checkpoint."""

    arrays: int
    nonfinite: dict[str, int]
    """Number of NaN and Inf elements by array name."""
    unreadable: tuple[str, ...]
    """Error messages of arrays that could not be read."""


def check_finite(contents: Contents) -> FiniteCheck:
    """Counts NaN and Inf in every floating-point array; reads each shared storage once."""
    nonfinite: dict[str, int] = {}
    unreadable = []
    seen = set()
    for array in contents.arrays:
        if array.storage is not None and array.storage in seen:
            continue
        seen.add(array.storage)
        if array.dtype.startswith(("int", "uint", "bool")):
            continue
        bad = 0
        try:
            for piece in array.read():
                bad += len(piece) - int(np.count_nonzero(np.isfinite(piece)))
        except (ProbeError, ValueError, TypeError, RuntimeError, MemoryError) as error:
            unreadable.append(str(error) or f"{dotted(array.path)} needs too much memory")
            continue
        if bad:
            nonfinite[dotted(array.path)] = bad
    return FiniteCheck(len(contents.arrays), nonfinite, tuple(unreadable))


# -- a checkpoint that was not written by a healcore store -----------------------------------------


def _probe_other(path: Path, inputs: CheckpointInputs) -> ProbeResult:
    # Checked first, because torch may read wrong values from a damaged archive.
    archives = check_archives(path)
    try:
        contents = open_contents(path)
    except ProbeError as error:
        if archives is None or not archives.damage or not archives.records:
            raise  # the file is probably no archive, and a report of damage would mislead
        unread = Check("readable", ERROR, str(error))
        return ProbeResult("checkpoint", str(path), (unread, _archive_digests(archives)))
    if not contents.arrays:
        raise NothingToProbe(
            f"{path} is a {contents.format} without arrays: there is nothing to check"
        )
    found = check_finite(contents)
    bad = inspection.disallowed(found.nonfinite, inputs.nonfinite_ok)
    checks = []
    if found.unreadable:
        checks.append(Check("readable", ERROR, "; ".join(found.unreadable[:3])))
    else:
        checks.append(Check("readable", PASS, f"all {found.arrays} arrays"))
    if bad:
        message = f"NaN or Inf in {len(bad)} of {found.arrays} arrays: {first_three(bad)}"
        checks.append(Check("finite", FAIL, message, len(bad), 0))
    else:
        message = f"no NaN and no Inf in {found.arrays - len(found.unreadable)} arrays"
        checks.append(Check("finite", PASS, message, 0, 0))
    if archives is None:
        message = f"not known: a {contents.format} has no digests"
        checks.append(Check("digests", SKIP, message, decides=False))
    else:
        checks.append(_archive_digests(archives))
    message = "not known: only a healcore store records the health of later steps"
    checks.append(Check("known_good", SKIP, message, decides=inputs.require_good))
    facts = {
        "format": contents.format,
        "arrays": found.arrays,
        "nonfinite": found.nonfinite,
        "known_good": None,
    }
    return ProbeResult("checkpoint", str(path), tuple(checks), facts, contents.notes)


def _archive_digests(archives: ArchiveCheck) -> Check:
    if archives.damage:
        return Check("digests", FAIL, "; ".join(archives.damage[:3]), len(archives.damage), 0)
    return Check("digests", PASS, f"the CRC-32 of all {archives.records} records match", 0, 0)


# -- a healcore store, or one checkpoint of it -----------------------------------------------------


class ProbedCheckpoint(NamedTuple):
    """One checkpoint of a store, with the results of the probe."""

    saved: Saved
    damage: tuple[CheckpointDamaged, ...]
    counts: bool
    """Whether the store uses this save; a step can have several saves."""
    deleted: bool = False
    """Whether the checkpoint was deleted during the probe."""

    @property
    def restorable(self) -> bool:
        """Whether a run could roll back to the checkpoint: intact, finite and known-good."""
        return not self.damage and self.saved.finite and self.saved.status == "good"


def is_store(path: Path) -> bool:
    """Whether a directory is a store, or one checkpoint in a store."""
    return path.is_dir() and any(
        manifest.step_of(folder) is not None for folder in (path, *path.iterdir())
    )


def _probe_store(path: Path, inputs: CheckpointInputs) -> ProbeResult:
    is_checkpoint = manifest.step_of(path) is not None
    root = path.parent if is_checkpoint else path

    def wanted(folder: Path) -> bool:
        of_step = inputs.step is None or manifest.step_of(folder) == inputs.step
        return of_step and (not is_checkpoint or folder.name == path.name)

    try:
        complete = manifest.complete(root)
        broken = [each for each in manifest.incomplete(root) if wanted(Path(each.path))]
        problems = manifest.problems(root)
    except (StoreError, OSError) as error:
        raise ProbeError(str(error)) from None
    probed = [
        _probe_saved(found, found is manifest.newest(saves), inputs)
        for saves in complete.values()
        for found in saves
        if wanted(found.folder)
    ]
    present = [each for each in probed if not each.deleted]
    if not present and not broken:
        which = "" if inputs.step is None else f" of step {inputs.step}"
        raise NothingToProbe(f"{path} contains no checkpoint{which}")
    checks = [
        _digests(present, broken),
        _finite(present),
        _known_good(present, inputs),
    ]
    newest = next((each.saved.step for each in reversed(present) if each.restorable), None)
    facts = {
        "format": "store of healcore",
        "checkpoints": [_row(each) for each in present],
        "newest_good": newest,
        "known_good": newest is not None,
    }
    names = {Path(each.path).name for each in broken}
    notes = [problem for problem in problems if not any(name in problem for name in names)]
    notes += [f"step {each.saved.step} was deleted meanwhile" for each in probed if each.deleted]
    return ProbeResult("checkpoint", str(path), tuple(checks), facts, tuple(notes))


def _probe_saved(
    found: StoredCheckpoint, counts: bool, inputs: CheckpointInputs
) -> ProbedCheckpoint:
    saved = manifest.saved(found, inputs.nonfinite_ok)
    damage = manifest.find_damage(found, sorted(found.manifest.files))
    if damage and not found.folder.exists():
        return ProbedCheckpoint(saved, (), counts, deleted=True)
    if inputs.deep and not damage:
        read = check_finite(open_contents(found.folder))
        damage = [
            found.damaged(name, "holds NaN or Inf that its manifest does not record")
            for name in read.nonfinite
            if name not in found.manifest.nonfinite
        ]
        damage += [found.damaged("data", problem) for problem in read.unreadable]
    return ProbedCheckpoint(saved, tuple(damage), counts)


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
        message = "every file has its recorded digest"
        return Check("digests", PASS, f"{which}: {message}", 0, 0)
    # The run has already noticed damage in a quarantined checkpoint.
    known = not broken and all(each.saved.status == "quarantined" for each in probed if each.damage)
    return Check("digests", WARN if known else FAIL, first_three(bad, "; "), number, 0)


def _finite(probed: list[ProbedCheckpoint]) -> Check:
    """Checks the arrays for NaN and Inf that `nonfinite_ok` does not allow."""
    bad = [each for each in probed if not each.saved.finite]
    if not bad:
        return Check("finite", PASS, "no NaN and no Inf were recorded at the save", 0, 0)
    first = bad[0].saved
    names = ", ".join(first.nonfinite[:3]) or "more arrays than are listed"
    message = f"NaN or Inf in step {first.step}: {names}"
    if first.status == "good":
        message += "; the run marked it good, so it allowed NaN: pass --nonfinite-ok NAME"
    if len(bad) > 1:
        message += f"; and in {len(bad) - 1} more checkpoints"
    usable = any(each.restorable for each in probed) or all(
        each.saved.status == "good" for each in bad
    )
    return Check("finite", WARN if usable else FAIL, message, len(bad), 0)


def _known_good(probed: list[ProbedCheckpoint], inputs: CheckpointInputs) -> Check:
    good = [each.saved.step for each in probed if each.restorable]
    if good:
        message = f"{len(good)} of {len(probed)} checkpoints; the newest is step {good[-1]}"
        return Check("known_good", PASS, message, len(good), 1)
    marked = any(each.saved.status == "good" for each in probed)
    message = (
        "every checkpoint marked good is damaged or not finite"
        if marked
        else "none yet: a checkpoint becomes known-good after healthy steps"
    )
    return Check("known_good", FAIL if marked or inputs.require_good else WARN, message, 0, 1)


def _row(each: ProbedCheckpoint) -> dict[str, Any]:
    return {
        "step": each.saved.step,
        "status": each.saved.status,
        "finite": each.saved.finite,
        "nonfinite": each.saved.nonfinite,
        "intact": not each.damage,
        "damage": [f"{wrong.file} {wrong.difference}" for wrong in each.damage],
        "counts": each.counts,
        "bytes": each.saved.bytes,
        "healing": each.saved.healing,
        "path": each.saved.path,
    }
