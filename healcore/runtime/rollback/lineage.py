"""Which run the journal and the checkpoints of a directory belong to, and what is left of them.

A journal that is read by another run would hand it a learning-rate cut and left-out data that are
not its own. And a directory whose checkpoints are all damaged lists none, like an empty one: only
the journal and the damaged directories say that there was a run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from healcore.runtime.rollback.journal import Journal, JournalError
from healcore.runtime.store import CheckpointDamaged, Landed, NoGoodCheckpoint, Saved
from healcore.runtime.store.manifest import STATUS, stated

_SHOWN = 3


def check(journal: Journal, landed: Landed) -> None:
    """That journal and checkpoint are of one run. Called before anything live is changed.

    Raises:
        JournalError: they are not; the message says which file to delete.
    """
    mine = journal.page.lineage
    its = (landed.restored.healing or {}).get("lineage") or mine
    if mine is None:  # the journal was deleted, or is of an earlier healcore
        journal.page.lineage = its
    elif its != mine:
        raise JournalError(
            f"{journal.path} is of run {mine}, and the checkpoint of step {landed.step} beside it "
            f"of run {its}. To go on from that checkpoint, without the learning-rate cut and the "
            "left-out data that the file holds, delete the file; or pass another directory"
        )


def refuse_if_lost(journal: Journal, damaged: Sequence[CheckpointDamaged]) -> None:
    """Where no checkpoint is listed: whether there was one.

    Args:
        journal: as it was read.
        damaged: those that are there and not listed.

    Raises:
        NoGoodCheckpoint: there was, and a run from step 0 would look as if nothing had happened.
    """
    if damaged:
        raise nothing_left(journal, [], damaged)
    if journal.page.saved is not None:
        raise NoGoodCheckpoint(
            f"{journal.path} is of a run that had saved step {journal.page.saved}, and none of its "
            "checkpoints is there: bring them back; to begin a new run in this directory, delete it"
        )


def nothing_left(
    journal: Journal, saves: Sequence[Saved], damaged: Sequence[CheckpointDamaged]
) -> NoGoodCheckpoint:
    """What is wrong with every checkpoint of a directory, the newest first, and the ways out.

    Args:
        journal: of the directory.
        saves: the checkpoints that are listed.
        damaged: all that were found damaged.
    """
    where = "the store" if journal.path is None else journal.path.parent
    wrong = {s.step: s.status if s.finite else "not finite" for s in saves}
    wrong |= {e.step: f"damaged: {e.file} {e.difference}" for e in damaged}
    told = [f"step {step} ({wrong[step]})" for step in sorted(wrong, reverse=True)]
    more = f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
    plan = journal.page.begun
    begun = (
        ""
        if plan is None
        else f" {journal.path} says that a rollback to one of the steps {plan.order} was under way:"
        " delete that file to give it up, and what it has cost with it."
    )
    return NoGoodCheckpoint(
        f"{where} holds an earlier run, and none of its checkpoints can be used: "
        f"{', '.join(told[:_SHOWN])}{more}.{begun} Bring an intact copy back, or pass an empty "
        "directory to begin anew"
    )


# -- what was set aside -------------------------------------------------------------------------


def directories(saves: Sequence[Saved], steps: Collection[int]) -> list[str]:
    """Names of the directories of some steps' checkpoints, of those that are on disk."""
    return [Path(s.path).name for s in saves if s.path is not None and s.step in steps]


def note_disk(journal: Journal, saves: Sequence[Saved]) -> None:
    """Takes into the journal what it has to know of the disk.

    Args:
        journal: about to be written.
        saves: the checkpoints that are listed.
    """
    if journal.path is None:
        return
    page, folder = journal.page, journal.path.parent
    page.saved = max((s.step for s in saves if s.path is not None), default=page.saved)
    aside = directories(saves, [s.step for s in saves if s.status == "quarantined"])
    names = sorted({*page.quarantined, *aside})
    page.quarantined = [
        name
        for name in names
        if (folder / name).is_dir() and stated(folder / name) in ("quarantined", None)
    ]


class Unstated(NamedTuple):
    """Steps of checkpoints that had been marked and whose status file is damaged, or is gone."""

    quarantined: list[int]
    """By the journal. (A file that is whole counts, whatever the journal says: a person may have
    marked it.)"""
    unknown: list[int]
    """They were known-good, or somebody else has quarantined them."""


def unstated(saves: Sequence[Saved], journal: Journal) -> Unstated:
    """Checkpoints whose listed status is not the one that they were given.

    Args:
        saves: the checkpoints that are listed.
        journal: of the directory.
    """
    silent = {s.step: Path(s.path) for s in saves if s.path and stated(Path(s.path)) is None}
    known = set(journal.page.quarantined)
    damaged = [step for step, folder in silent.items() if (folder / STATUS).exists()]
    quarantined = [step for step, folder in silent.items() if folder.name in known]
    return Unstated(quarantined, [step for step in damaged if step not in quarantined])
