"""Which run the journal and the checkpoints of a directory belong to, and which can be used.

The journal of one run must not be applied to another: it would bring a foreign learning-rate cut
and skip the wrong batches. And a directory whose checkpoints are all damaged lists none, like an
empty one: only the journal and the damaged directories show that there was a run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from healcore.runtime.rollback.journal import Journal, JournalError
from healcore.runtime.store import CheckpointDamaged, NoGoodCheckpoint, RestoreResult, Saved
from healcore.runtime.store.manifest import STATUS, stated

_SHOWN = 3


def check_lineage(journal: Journal, result: RestoreResult) -> None:
    """Checks that journal and checkpoint are of one run, before anything live is changed.

    Raises:
        JournalError: they are not; the message says which file to delete.
    """
    of_journal = journal.state.lineage
    of_checkpoint = (result.restored.healing or {}).get("lineage") or of_journal
    if of_journal is None:  # the journal was deleted
        journal.state.lineage = of_checkpoint
    elif of_checkpoint != of_journal:
        raise JournalError(
            f"{journal.path} is of run {of_journal}, and the checkpoint of step {result.step} "
            f"beside it of run {of_checkpoint}. To resume from that checkpoint, without the "
            "learning-rate cut and the skipped batches that the file holds, delete the file; or "
            "pass another directory"
        )


def refuse_if_lost(journal: Journal, damaged: Sequence[CheckpointDamaged]) -> None:
    """Where no checkpoint is listed: refuses to start if there had been one.

    Args:
        journal: as it was read.
        damaged: checkpoints that exist and are not listed.

    Raises:
        NoGoodCheckpoint: there had been one. A run from step 0 would hide its loss.
    """
    if damaged:
        raise no_usable_checkpoint(journal, [], damaged)
    if journal.state.newest_on_disk is not None:
        raise NoGoodCheckpoint(
            f"{journal.path} is of a run that had saved step {journal.state.newest_on_disk}, and "
            "none of its checkpoints exists: restore them; to begin a new run in this directory, "
            "delete it"
        )


def no_usable_checkpoint(
    journal: Journal, saves: Sequence[Saved], damaged: Sequence[CheckpointDamaged]
) -> NoGoodCheckpoint:
    """The error that says what is wrong with every checkpoint, newest first, and what to do.

    Args:
        journal: of the directory.
        saves: the checkpoints that are listed.
        damaged: all that were found damaged.
    """
    where = "the store" if journal.path is None else journal.path.parent
    wrong = {s.step: s.status if s.finite else "not finite" for s in saves}
    wrong |= {e.step: f"damaged: {e.file} {e.difference}" for e in damaged}
    lines = [f"step {step} ({wrong[step]})" for step in sorted(wrong, reverse=True)]
    more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    plan = journal.state.pending
    pending = (
        ""
        if plan is None
        else f" {journal.path} holds an unfinished rollback to one of the steps {plan.order}: to "
        "abandon it, and the budgets that the file holds, delete that file."
    )
    return NoGoodCheckpoint(
        f"{where} holds an earlier run, and none of its checkpoints can be used: "
        f"{', '.join(lines[:_SHOWN])}{more}.{pending} Restore an intact copy, or pass an empty "
        "directory to begin a new run"
    )


# -- what is quarantined --------------------------------------------------------------------------


def directories(saves: Sequence[Saved], steps: Collection[int]) -> list[str]:
    """Directory names of the checkpoints of some steps, of those that are on disk."""
    return [Path(s.path).name for s in saves if s.path is not None and s.step in steps]


def update_from_disk(journal: Journal, saves: Sequence[Saved]) -> None:
    """Updates what the journal holds about the checkpoints on disk.

    Args:
        journal: about to be written.
        saves: the checkpoints that are listed.
    """
    if journal.path is None:
        return
    state, folder = journal.state, journal.path.parent
    on_disk = [s.step for s in saves if s.path is not None]
    state.newest_on_disk = max(on_disk, default=state.newest_on_disk)
    quarantined = directories(saves, [s.step for s in saves if s.status == "quarantined"])
    names = sorted({*state.quarantined, *quarantined})
    state.quarantined = [
        name
        for name in names
        if (folder / name).is_dir() and stated(folder / name) in ("quarantined", None)
    ]


class LostStatus(NamedTuple):
    """Steps of checkpoints whose status file is damaged or missing."""

    quarantined: list[int]
    """Quarantined by the journal. (An intact status file overrides the journal: a person may have
    changed it.)"""
    unknown: list[int]
    """They were known-good, or quarantined by somebody else."""


def lost_status(saves: Sequence[Saved], journal: Journal) -> LostStatus:
    """Finds checkpoints whose listed status is not the one that they were given.

    Args:
        saves: the checkpoints that are listed.
        journal: of the directory.
    """
    without = {s.step: Path(s.path) for s in saves if s.path and stated(Path(s.path)) is None}
    known = set(journal.state.quarantined)
    damaged = [step for step, folder in without.items() if (folder / STATUS).exists()]
    quarantined = [step for step, folder in without.items() if folder.name in known]
    return LostStatus(quarantined, [step for step in damaged if step not in quarantined])
