"""A store of healcore's on disk: every checkpoint in it, and whether there is one to go back to.

Reads the directory with the functions that the stores themselves use, and makes no store: that
would sweep it. No lock is taken, so a run may be at work in it; what it deletes meanwhile is told.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from healcore.runtime.store import StoreError, inspection, manifest
from healcore.runtime.store.claim import LOCK
from healcore.runtime.store.manifest import Found, Wrong
from healcore.runtime.store.protocol import Saved
from healcore.tools.probe.checkpoint.finiteness import look
from healcore.tools.probe.checkpoint.pickled import pickled_in
from healcore.tools.probe.checkpoint.thresholds import CheckpointInputs
from healcore.tools.probe.contents import open_contents
from healcore.tools.probe.verdict import Check, NothingToProbe, ProbeError, Result, Verdict

PASS, WARN, FAIL = Verdict.PASS, Verdict.WARN, Verdict.FAIL

_DIFFERS = "is not what was written: its digest differs"


class Judged(NamedTuple):
    """One checkpoint."""

    saved: Saved
    damage: tuple[Wrong, ...]
    """Every file that is not what was written."""
    counts: bool
    """Whether it is the one that a store takes for its step."""
    gone: bool = False
    """It was deleted while it was looked at."""
    pickled: tuple[str, ...] = ()
    """Parts that would run code when they are read."""

    @property
    def sound(self) -> bool:
        """Whether a run could go back to it without a thought."""
        return not self.damage and self.saved.finite and self.saved.status == "good"


def is_store(path: Path) -> bool:
    """Whether a directory is a store's, or one checkpoint in it."""
    if not path.is_dir():
        return False
    names = (each.name for each in path.iterdir())
    return manifest.step_of(path) is not None or any(
        manifest.step_of(Path(name)) is not None for name in names
    )


def probe_store(path: Path, inputs: CheckpointInputs) -> Result:
    """Probes a store, or one checkpoint of it.

    Raises:
        ProbeError: it cannot be read.
        NothingToProbe: there is no checkpoint in it.
    """
    one = manifest.step_of(path) is not None
    root = path.parent if one else path

    def wanted(folder: Path) -> bool:
        of_step = inputs.step is None or manifest.step_of(folder) == inputs.step
        return of_step and (not one or folder.name == path.name)

    try:
        complete = manifest.complete(root)
        broken = [(at, wrong) for at, wrong in manifest.incomplete(root) if wanted(at)]
        told = manifest.problems(root)
    except (StoreError, OSError) as error:
        raise ProbeError(str(error)) from None
    judged = [
        _judged(found, found is manifest.newest(saves), inputs)
        for saves in complete.values()
        for found in saves
        if wanted(found.folder)
    ]
    there = [each for each in judged if not each.gone]
    if not there and not broken:
        which = "" if inputs.step is None else f" of step {inputs.step}"
        raise NothingToProbe(f"{path} holds no checkpoint{which}")
    checks = [_digests(there, broken), _finite(there), _known_good(there, inputs), *_pickled(there)]
    newest = next((each.saved.step for each in reversed(there) if each.sound), None)
    facts = {
        "format": "store of healcore",
        "checkpoints": [_row(each) for each in there],
        "newest_good": newest,
        "known_good": newest is not None,
    }
    notes = [told_of for told_of in told if not any(at.name in told_of for at, _ in broken)]
    notes += [f"step {each.saved.step} was deleted meanwhile" for each in judged if each.gone]
    if (root / LOCK).exists():
        notes.append(f"{LOCK} is there: a run may be at work in it, nothing was changed")
    return Result("checkpoint", str(path), tuple(checks), facts, tuple(notes))


def _judged(found: Found, counts: bool, inputs: CheckpointInputs) -> Judged:
    saved = manifest.saved(found.folder, found.manifest, inputs.nonfinite_ok)
    damage = _damage(found)
    if damage and not found.folder.exists():
        return Judged(saved, (), counts, gone=True)
    if inputs.deep and not damage:
        looked = look(open_contents(found.folder))
        unknown = [name for name in looked.nonfinite if name not in found.manifest.nonfinite]
        damage += [
            Wrong(name, "holds NaN or Inf that was not there when it was saved") for name in unknown
        ]
        damage += [Wrong("data", told) for told in looked.unreadable]
    return Judged(saved, tuple(damage), counts, pickled=() if damage else pickled_in(found.folder))


def _damage(found: Found) -> list[Wrong]:
    """Every file that is not what was written; its size was looked at already."""

    def wrong(name: str) -> Wrong | None:
        try:
            now = inspection.file_digest(found.folder / name)
        except OSError as error:
            return Wrong(name, f"cannot be read ({error.strerror})")
        return Wrong(name, _DIFFERS) if now != found.manifest.files[name] else None

    looked = inspection.mapped(wrong, sorted(found.manifest.files), found.manifest.bytes)
    return [each for each in looked if each is not None]


def _digests(judged: list[Judged], broken: list[tuple[Path, Wrong]]) -> Check:
    """Whether every file is what was written."""
    bad = [
        f"step {each.saved.step}: {wrong.file} {wrong.difference}"
        for each in judged
        for wrong in each.damage
    ]
    bad += [f"{at.name}: {wrong.file} {wrong.difference}" for at, wrong in broken]
    number = sum(1 for each in judged if each.damage) + len(broken)
    if not bad:
        files = f"all {len(judged)} checkpoint{'s' * (len(judged) != 1)}"
        told = "every file is what was written"
        if any(each.pickled for each in judged):
            # Whoever can write a pickle into a file can write its digest beside it.
            told = "every digest holds, which tells damage, not malice"
        return Check("digests", PASS, f"{files}: {told}", 0, 0)
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    # What a run has put aside is no surprise any more.
    known = not broken and all(each.saved.status == "quarantined" for each in judged if each.damage)
    return Check("digests", WARN if known else FAIL, "; ".join(bad[:3]) + more, number, 0)


def _pickled(judged: list[Judged]) -> list[Check]:
    """What in them would run code, if there is any."""
    found = [f"step {each.saved.step}: {part}" for each in judged for part in each.pickled]
    if not found:
        return []
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    message = (
        f"{'; '.join(found[:3])}{more}: reading these runs whatever is in them, and healcore does "
        "so with trust=True only"
    )
    return [Check("pickled", WARN, message, len(found), 0)]


def _finite(judged: list[Judged]) -> Check:
    """Whether there is NaN or Inf in an array where it is not meant."""
    bad = [each for each in judged if not each.saved.finite]
    if not bad:
        return Check("finite", PASS, "no NaN and no Inf, as recorded when they were saved", 0, 0)
    first = bad[0].saved
    names = ", ".join(first.nonfinite[:3]) or "more arrays than are named"
    message = f"NaN or Inf in step {first.step}: {names}"
    if first.status == "good":
        message += "; it was marked good, so meant then: pass --nonfinite-ok NAME"
    if len(bad) > 1:
        message += f"; and in {len(bad) - 1} more checkpoints"
    spared = any(each.sound for each in judged) or all(each.saved.status == "good" for each in bad)
    return Check("finite", WARN if spared else FAIL, message, len(bad), 0)


def _known_good(judged: list[Judged], inputs: CheckpointInputs) -> Check:
    """Whether there is one to go back to."""
    sound = [each.saved.step for each in judged if each.sound]
    if sound:
        message = f"{len(sound)} of {len(judged)}; the newest is step {sound[-1]}"
        return Check("known_good", PASS, message, len(sound), 1)
    marked = any(each.saved.status == "good" for each in judged)
    message = (
        "every checkpoint marked good is damaged or not finite"
        if marked
        else "none yet: a checkpoint is good when healthy steps have followed it"
    )
    return Check("known_good", FAIL if marked or inputs.require_good else WARN, message, 0, 1)


def _row(each: Judged) -> dict[str, Any]:
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
