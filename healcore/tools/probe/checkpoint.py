"""The checkpoint probe: is a checkpoint intact, finite and known-good?

The probe reads a healcore store with the functions of `runtime.store`, because a store object
would delete stale files. The probe takes no lock, so a run may write at the same time. Other
formats have no digests and do not record known-good checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from healcore.checkpoint_contents import ProbeError
from healcore.console import first_of
from healcore.runtime.store import manifest
from healcore.runtime.store.checkpoints import disallowed
from healcore.tools.probe.checkpoint_files import damaged_archives, open_contents
from healcore.tools.probe.checks import (
    SKIP,
    Check,
    CheckpointInputs,
    NothingToProbe,
    Report,
    check,
)


def probe_checkpoint(path: Path, inputs: CheckpointInputs) -> Report:
    """Runs the probe in the current process, without limits of memory and time.

    `healcore probe checkpoint` runs it in a child process (`checkpoint_files.probe_paths`), because
    a damaged file can crash the libraries that read it.

    Args:
        path: a file of torch or safetensors, a directory of DCP, Orbax or a trainer, a store of
            healcore, or one checkpoint of a store.
        inputs: which checkpoint of a store to judge, and what the checks allow.

    Returns:
        The checks "digests", "finite" and "known_good", and the checkpoints of a store.

    Raises:
        ProbeError: the path does not exist or cannot be read.
        NothingToProbe: there is no checkpoint, or a checkpoint without arrays.
        Exception: any exception for a damaged file, see `checks.run_probe`.
    """
    if not path.exists():
        raise ProbeError(f"{path}: no such file or directory")
    if path.is_dir() and (manifest.step_of(path) is not None or manifest.folders_of(path)):
        return _probe_store(path, inputs)
    return _probe_other(path, inputs)


def _probe_other(path: Path, inputs: CheckpointInputs) -> Report:
    """Judges a checkpoint without a manifest by its values, and by the CRC-32 in torch's files."""
    damage = damaged_archives(path)
    facts: dict[str, Any] = {"known_good": None}
    message = first_of(damage) or "no archive of torch is damaged"
    digests = check("digests", len(damage), False, damage, message)
    if damage:
        return Report("checkpoint", str(path), (digests,), facts)
    contents = open_contents(path)
    if not contents.arrays:
        raise NothingToProbe(f"{path} is a {contents.format} without arrays")
    facts |= {"format": contents.format, "arrays": len(contents.arrays), "nonfinite": {}}
    for keys, array in contents.arrays.items():
        if not array.dtype.startswith(("int", "uint", "bool")):
            count = int(np.count_nonzero(~np.isfinite(array.read())))
            if count:
                facts["nonfinite"][".".join(keys)] = count
    bad = disallowed(facts["nonfinite"], inputs.nonfinite_ok)
    message = f"NaN or Inf in {len(bad)} of {facts['arrays']} arrays: {first_of(bad)}"
    checks = [check("finite", len(bad), False, bad, message), digests]
    if inputs.require_good:
        message = "only a healcore store records the health of later steps"
        checks.append(Check("known_good", SKIP, message))
    return Report("checkpoint", str(path), tuple(checks), facts, contents.notes)


def _probe_store(path: Path, inputs: CheckpointInputs) -> Report:
    """Judges the checkpoints of a store, or one of them, by their manifests and digests."""
    root, step = path, inputs.step
    if manifest.step_of(path) is not None:
        root, step = path.parent, manifest.step_of(path)
    saves, incomplete = manifest.scan(root)
    damage = [each for each in incomplete if step in (None, each.step)]
    rows: list[dict[str, Any]] = []
    for saved, (found, *_) in zip(
        manifest.listed(saves, inputs.nonfinite_ok), saves.values(), strict=True
    ):
        if step in (None, saved.step):
            errors = manifest.find_damage(found)
            damage += errors
            rows.append({**saved._asdict(), "finite": saved.finite, "intact": not errors})
    if not rows and not damage:
        raise NothingToProbe(
            f"{path} contains no checkpoint to judge (step {inputs.step or 'any'})"
        )
    good = [
        row["step"] for row in rows if row["status"] == "good" and row["finite"] and row["intact"]
    ]
    bad = [f"step {row['step']}: {first_of(row['nonfinite'])}" for row in rows if not row["finite"]]
    damaged = [f"step {each.step}: {each.file} {each.difference}" for each in damage]
    all_damaged = not good and any(row["status"] == "good" for row in rows)
    checks = (
        check("digests", len(damaged), False, damaged, first_of(damaged) or "all as recorded"),
        check("finite", len(bad), bad, bad and not good, first_of(bad) or "no NaN and no Inf"),
        check(
            "known_good",
            len(good),
            not good,
            all_damaged or (inputs.require_good and not good),
            f"{len(good)} of {len(rows)} checkpoints: {first_of([*map(str, good[::-1])])}",
        ),
    )
    facts = {
        "format": "store of healcore",
        "checkpoints": rows,
        "known_good": bool(good),
        "newest_good": max(good, default=None),
    }
    return Report("checkpoint", str(path), checks, facts)
