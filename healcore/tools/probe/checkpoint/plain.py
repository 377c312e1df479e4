"""A checkpoint that no store of healcore's wrote: its numbers can be looked at, its past not."""

from __future__ import annotations

from pathlib import Path

from healcore.runtime.store.inspection import unmeant
from healcore.tools.probe.checkpoint.archive import examined
from healcore.tools.probe.checkpoint.finiteness import look
from healcore.tools.probe.checkpoint.thresholds import CheckpointInputs
from healcore.tools.probe.contents import open_contents
from healcore.tools.probe.contents.opening import archives
from healcore.tools.probe.verdict import Check, NothingToProbe, Result, Verdict

PASS, FAIL, SKIP, ERROR = Verdict.PASS, Verdict.FAIL, Verdict.SKIP, Verdict.ERROR


def probe_plain(path: Path, inputs: CheckpointInputs) -> Result:
    """Probes a file or directory of torch, safetensors, DCP or Orbax.

    Raises:
        ProbeError: it cannot be read.
    """
    contents = open_contents(path)
    if not contents.arrays:
        raise NothingToProbe(f"{path} is a {contents.format} without arrays: nothing to look at")
    looked = look(contents)
    bad = unmeant(looked.nonfinite, inputs.nonfinite_ok)
    checks = []
    if looked.unreadable:
        checks.append(Check("readable", ERROR, "; ".join(looked.unreadable[:3])))
    else:
        checks.append(Check("readable", PASS, f"all {looked.arrays} arrays"))
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        message = f"NaN or Inf in {len(bad)} of {looked.arrays} arrays: {', '.join(bad[:3])}{more}"
        checks.append(Check("finite", FAIL, message, len(bad), 0))
    else:
        message = f"no NaN and no Inf in {looked.arrays - len(looked.unreadable)} arrays"
        checks.append(Check("finite", PASS, message, 0, 0))
    checks.append(_digests(path, contents.format))
    good = "cannot say: only a store of healcore's knows what followed a checkpoint"
    checks.append(Check("known_good", SKIP, good, decides=inputs.require_good))
    facts = {
        "format": contents.format,
        "arrays": looked.arrays,
        "nonfinite": looked.nonfinite,
        "known_good": None,
    }
    return Result("checkpoint", str(path), tuple(checks), facts, contents.notes)


def _digests(path: Path, format: str) -> Check:
    """Torch's files are zip archives, and those have a CRC-32 of every record."""
    files = archives(path)
    if not files:
        told = f"cannot say: a {format} carries none"
        return Check("digests", SKIP, told, decides=False)
    bad, records = [], 0
    for file in files:
        found = examined(file)
        records += found.records
        if found.damage is not None:
            bad.append(found.damage if file == path else f"{file.name}: {found.damage}")
    if bad:
        return Check("digests", FAIL, "; ".join(bad[:3]), len(bad), 0)
    return Check("digests", PASS, f"the CRC-32 of all {records} records hold", 0, 0)
