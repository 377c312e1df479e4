"""A checkpoint that no store of healcore's wrote: its numbers can be looked at, its past not."""

from __future__ import annotations

from pathlib import Path

from healcore.runtime.store.inspection import disallowed
from healcore.tools.probe.checkpoint.archive import examined
from healcore.tools.probe.checkpoint.finiteness import look
from healcore.tools.probe.checkpoint.thresholds import CheckpointInputs
from healcore.tools.probe.contents import open_contents
from healcore.tools.probe.contents.opening import archives
from healcore.tools.probe.verdict import Check, NothingToProbe, ProbeError, Result, Verdict

PASS, FAIL, SKIP, ERROR = Verdict.PASS, Verdict.FAIL, Verdict.SKIP, Verdict.ERROR


def probe_plain(path: Path, inputs: CheckpointInputs) -> Result:
    """Probes a file or directory of torch, safetensors, DCP or Orbax.

    Raises:
        ProbeError: it cannot be read.
    """
    # First: of a damaged archive torch may read what was never in it, or nothing.
    archive, records = _archive(path) if path.exists() else (None, 0)
    try:
        contents = open_contents(path)
    except ProbeError as error:
        if archive is None or archive.verdict is not FAIL or not records:
            raise  # what is no archive at all may be anything
        return Result("checkpoint", str(path), (Check("readable", ERROR, str(error)), archive))
    if not contents.arrays:
        raise NothingToProbe(f"{path} is a {contents.format} without arrays: nothing to look at")
    looked = look(contents)
    bad = disallowed(looked.nonfinite, inputs.nonfinite_ok)
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
    none = f"cannot say: a {contents.format} carries none"
    checks.append(archive or Check("digests", SKIP, none, decides=False))
    good = "cannot say: only a store of healcore's knows what followed a checkpoint"
    checks.append(Check("known_good", SKIP, good, decides=inputs.require_good))
    facts = {
        "format": contents.format,
        "arrays": looked.arrays,
        "nonfinite": looked.nonfinite,
        "known_good": None,
    }
    return Result("checkpoint", str(path), tuple(checks), facts, contents.notes)


def _archive(path: Path) -> tuple[Check | None, int]:
    """Torch's files are zip archives, with a CRC-32 of every record; and how many records."""
    files = archives(path)
    if not files:
        return None, 0
    bad, records = [], 0
    for file in files:
        found = examined(file)
        records += found.records
        if found.damage is not None:
            bad.append(found.damage if file == path else f"{file.name}: {found.damage}")
    if bad:
        return Check("digests", FAIL, "; ".join(bad[:3]), len(bad), 0), records
    return Check("digests", PASS, f"the CRC-32 of all {records} records hold", 0, 0), records
