"""The checkpoint probe: is a checkpoint intact, finite and known-good?

It reads a healcore store with the functions of `runtime.store`. A store object would delete stale
files. It takes no lock, so a run may write at the same time; checkpoints that the run deletes
meanwhile are listed in the notes. For other checkpoints known-good is not recorded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from healcore import regular_file
from healcore.plugins.checkpoint_contents import Contents, ProbeError, dotted
from healcore.runtime.store import (
    CheckpointDamaged,
    StoreError,
    inspection,
    manifest,
    structure,
)
from healcore.runtime.store.claim import LOCK
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
    several,
)


def probe_checkpoint(path: str | Path, inputs: CheckpointInputs | None = None) -> ProbeResult:
    """Probes a store, one checkpoint of it, or a checkpoint of torch, safetensors, DCP or Orbax.

    Raises ProbeError if it cannot be read, NothingToProbe if there is no checkpoint or array.
    """
    return run_probe("checkpoint", path, inputs or CheckpointInputs())


def judge(path: Path, inputs: CheckpointInputs) -> ProbeResult:
    """`probe_checkpoint` in this process."""
    if not path.exists():
        raise ProbeError(f"{path}: there is no such file or directory")
    return (_probe_store if is_store(path) else _probe_other)(path, inputs)


class FiniteCheck(NamedTuple):
    """NaN and Inf in the arrays of a checkpoint."""

    arrays: int
    nonfinite: dict[str, int]
    """Name of an array -> number of its elements that are NaN or Inf."""
    unreadable: tuple[str, ...]


def check_finite(contents: Contents) -> FiniteCheck:
    """Reads every floating-point array, in pieces, and each shared storage once."""
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
            unreadable.append(str(error) or f"{dotted(array.path)} asks for too much memory")
            continue
        if bad:
            nonfinite[dotted(array.path)] = bad
    return FiniteCheck(len(contents.arrays), nonfinite, tuple(unreadable))


# -- a checkpoint that was not written by a healcore store -----------------------------------------


def _probe_other(path: Path, inputs: CheckpointInputs) -> ProbeResult:
    # First, because torch may read wrong values from a damaged archive.
    archives = check_archives(path)
    try:
        contents = open_contents(path)
    except ProbeError as error:
        if archives is None or not archives.damage or not archives.records:
            raise  # probably not an archive: a report of damage would be misleading
        unread = Check("readable", ERROR, str(error))
        return ProbeResult("checkpoint", str(path), (unread, _archived(archives)))
    if not contents.arrays:
        raise NothingToProbe(f"{path} is a {contents.format} without arrays: nothing to look at")
    found = check_finite(contents)
    bad = inspection.disallowed(found.nonfinite, inputs.nonfinite_ok)
    checks = []
    if found.unreadable:
        checks.append(Check("readable", ERROR, "; ".join(found.unreadable[:3])))
    else:
        checks.append(Check("readable", PASS, f"all {found.arrays} arrays"))
    if bad:
        message = f"NaN or Inf in {len(bad)} of {found.arrays} arrays: {several(bad)}"
        checks.append(Check("finite", FAIL, message, len(bad), 0))
    else:
        message = f"no NaN and no Inf in {found.arrays - len(found.unreadable)} arrays"
        checks.append(Check("finite", PASS, message, 0, 0))
    if archives is None:
        none = f"not known: a {contents.format} has no digests"
        checks.append(Check("digests", SKIP, none, decides=False))
    else:
        checks.append(_archived(archives))
    good = "not known: only a healcore store records the steps after a checkpoint"
    checks.append(Check("known_good", SKIP, good, decides=inputs.require_good))
    facts = {
        "format": contents.format,
        "arrays": found.arrays,
        "nonfinite": found.nonfinite,
        "known_good": None,
    }
    return ProbeResult("checkpoint", str(path), tuple(checks), facts, contents.notes)


def _archived(found: ArchiveCheck) -> Check:
    if found.damage:
        return Check("digests", FAIL, "; ".join(found.damage[:3]), len(found.damage), 0)
    return Check("digests", PASS, f"the CRC-32 of all {found.records} records hold", 0, 0)


# -- a healcore store, or one checkpoint of it -----------------------------------------------------


class ProbedCheckpoint(NamedTuple):
    """One checkpoint of a store."""

    saved: Saved
    damage: tuple[CheckpointDamaged, ...]
    counts: bool
    """Whether a store would use this save; a step can be saved more than once."""
    gone: bool = False
    """Whether it was deleted during the probe."""
    pickled: tuple[str, ...] = ()
    """Names of pickled parts, which may run code when they are read."""

    @property
    def restorable(self) -> bool:
        """Whether a run could roll back to it: intact, finite and known-good."""
        return not self.damage and self.saved.finite and self.saved.status == "good"


def is_store(path: Path) -> bool:
    """Whether a directory is a store, or one checkpoint in a store."""
    return path.is_dir() and (
        manifest.step_of(path) is not None
        or any(manifest.step_of(each) is not None for each in path.iterdir())
    )


def _probe_store(path: Path, inputs: CheckpointInputs) -> ProbeResult:
    one = manifest.step_of(path) is not None
    root = path.parent if one else path

    def wanted(folder: Path) -> bool:
        of_step = inputs.step is None or manifest.step_of(folder) == inputs.step
        return of_step and (not one or folder.name == path.name)

    try:
        complete = manifest.complete(root)
        broken = [each for each in manifest.incomplete(root) if wanted(Path(each.path))]
        problems = manifest.problems(root)
    except (StoreError, OSError) as error:
        raise ProbeError(str(error)) from None
    probed = [
        _probed(found, found is manifest.newest(saves), inputs)
        for saves in complete.values()
        for found in saves
        if wanted(found.folder)
    ]
    there = [each for each in probed if not each.gone]
    if not there and not broken:
        which = "" if inputs.step is None else f" of step {inputs.step}"
        raise NothingToProbe(f"{path} holds no checkpoint{which}")
    checks = [_digests(there, broken), _finite(there), _known_good(there, inputs), *_pickled(there)]
    newest = next((each.saved.step for each in reversed(there) if each.restorable), None)
    facts = {
        "format": "store of healcore",
        "checkpoints": [_row(each) for each in there],
        "newest_good": newest,
        "known_good": newest is not None,
    }
    names = {Path(each.path).name for each in broken}
    notes = [problem for problem in problems if not any(name in problem for name in names)]
    notes += [f"step {each.saved.step} was deleted meanwhile" for each in probed if each.gone]
    if (root / LOCK).exists():
        notes.append(f"{LOCK} exists: a run may be writing; nothing was changed")
    return ProbeResult("checkpoint", str(path), tuple(checks), facts, tuple(notes))


def _probed(found: StoredCheckpoint, counts: bool, inputs: CheckpointInputs) -> ProbedCheckpoint:
    saved = manifest.saved(found, inputs.nonfinite_ok)
    damage = manifest.find_damage(found, sorted(found.manifest.files))
    if damage and not found.folder.exists():
        return ProbedCheckpoint(saved, (), counts, gone=True)
    if inputs.deep and not damage:
        read = check_finite(open_contents(found.folder))
        damage = [
            found.damaged(name, "holds NaN or Inf that was not there when it was saved")
            for name in read.nonfinite
            if name not in found.manifest.nonfinite
        ]
        damage += [found.damaged("data", problem) for problem in read.unreadable]
    pickled = () if damage else _pickled_parts(found.folder)
    return ProbedCheckpoint(saved, tuple(damage), counts, pickled=pickled)


def _pickled_parts(folder: Path) -> tuple[str, ...]:
    """Names of the pickled parts of a checkpoint except DCP's index, which is read safely."""
    found: list[str] = []
    for file in sorted(folder.glob("state*.json")):
        try:
            for name, entry in json.loads(regular_file.read(file)).items():
                tree = "tree" in entry
                nodes = [entry["tree"]] if tree else [node for _, node in entry.get("leaves", ())]
                found += [at for node in nodes for at in structure.pickles_in(node, (name,))]
                # A loader's state is JSON within a string.
                if name == "healcore" and '{\\"pickle\\":' in json.dumps(entry):
                    found.append("the state of a loader in state['healcore']['data']")
        except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
            raise ProbeError(f"{file} is damaged: {error}") from None
    return tuple(found)


def _digests(probed: list[ProbedCheckpoint], broken: list[CheckpointDamaged]) -> Check:
    """Whether every file has the digest that was recorded when it was written."""
    bad = [
        f"step {each.saved.step}: {wrong.file} {wrong.difference}"
        for each in probed
        for wrong in each.damage
    ]
    bad += [f"{Path(each.path).name}: {each.file} {each.difference}" for each in broken]
    number = sum(1 for each in probed if each.damage) + len(broken)
    if not bad:
        which = f"all {len(probed)} checkpoint{'s' * (len(probed) != 1)}"
        message = "every file is what was written"
        if any(each.pickled for each in probed):
            # An attacker who replaces a pickle can replace its digest too.
            message = "every digest holds; digests show damage, not malice"
        return Check("digests", PASS, f"{which}: {message}", 0, 0)
    # The run has already noticed damage in a quarantined checkpoint.
    known = not broken and all(each.saved.status == "quarantined" for each in probed if each.damage)
    return Check("digests", WARN if known else FAIL, several(bad, "; "), number, 0)


def _pickled(probed: list[ProbedCheckpoint]) -> list[Check]:
    found = [f"step {each.saved.step}: {part}" for each in probed for part in each.pickled]
    if not found:
        return []
    message = (
        f"{several(found, '; ')}: reading a pickle can run code, and healcore reads these with "
        "trust=True only"
    )
    return [Check("pickled", WARN, message, len(found), 0)]


def _finite(probed: list[ProbedCheckpoint]) -> Check:
    """Whether an array holds NaN or Inf that `nonfinite_ok` does not allow."""
    bad = [each for each in probed if not each.saved.finite]
    if not bad:
        return Check("finite", PASS, "no NaN and no Inf, as recorded at the save", 0, 0)
    first = bad[0].saved
    names = ", ".join(first.nonfinite[:3]) or "more arrays than are listed"
    message = f"NaN or Inf in step {first.step}: {names}"
    if first.status == "good":
        message += "; it was marked good, so NaN was allowed: pass --nonfinite-ok NAME"
    if len(bad) > 1:
        message += f"; and in {len(bad) - 1} more checkpoints"
    usable = any(each.restorable for each in probed) or all(
        each.saved.status == "good" for each in bad
    )
    return Check("finite", WARN if usable else FAIL, message, len(bad), 0)


def _known_good(probed: list[ProbedCheckpoint], inputs: CheckpointInputs) -> Check:
    good = [each.saved.step for each in probed if each.restorable]
    if good:
        message = f"{len(good)} of {len(probed)}; the newest is step {good[-1]}"
        return Check("known_good", PASS, message, len(good), 1)
    marked = any(each.saved.status == "good" for each in probed)
    message = (
        "every checkpoint marked good is damaged or not finite"
        if marked
        else "none yet: a checkpoint is good after healthy steps"
    )
    return Check("known_good", FAIL if marked or inputs.require_good else WARN, message, 0, 1)


def _row(each: ProbedCheckpoint) -> dict[str, Any]:
    return {
        "step": each.saved.step,
        "status": each.saved.status,
        "finite": each.saved.finite,
        "nonfinite": each.saved.nonfinite,
        "intact": not each.damage,
        "pickled": each.pickled,
        "damage": [f"{wrong.file} {wrong.difference}" for wrong in each.damage],
        "counts": each.counts,
        "bytes": each.saved.bytes,
        "healing": each.saved.healing,
        "path": each.saved.path,
    }
