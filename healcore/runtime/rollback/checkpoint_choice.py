"""Which checkpoint: pure functions of the list of checkpoints and of what the ledger knows.

A checkpoint of step n holds the state after n optimizer steps, and steps are counted from 0: it is
the state that step n starts from. So one whose step is the onset's is the last without the trouble
in it, and what was saved later has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from healcore.runtime.ledger import PastRollback
from healcore.runtime.store.errors import NoGoodCheckpoint
from healcore.runtime.store.protocol import Saved, Status

_WORST_FIRST: tuple[Status, ...] = ("quarantined", "candidate", "good")


class Choice(NamedTuple):
    """Where to go back to."""

    order: tuple[int, ...]
    """Steps to try, the wanted one first; the next one is for when that is damaged."""
    initial: bool
    """There is no known-good checkpoint left to go to: it is the initial snapshot."""
    repeated: bool
    """An earlier rollback of this region went to this step already and nothing older is there:
    restoring it alone changes nothing, another action has to come with it, or the run stops."""


def choose(
    saves: Sequence[Saved],
    *,
    onset: int,
    depth: int = 1,
    earlier: Sequence[PastRollback] = (),
    region: int = 0,
    initial: Sequence[int] = (),
) -> Choice:
    """The checkpoint to restore.

    Args:
        saves: the checkpoints there are; with several ranks what `common` makes of them.
        onset: step of the incident's first alarm.
        depth: known-good checkpoints to go back, 1 = the newest before the onset. The engine's
            `rollback_depth`, which grows from incident to incident in a region.
        earlier: rollbacks so far.
        region: onsets fewer steps apart than this are in the same region. A second rollback there
            goes to an older checkpoint than the first, even if others have become good since: they
            lie on the same way into the same trouble.
        initial: the last resort, in this order: step of the snapshot that the run began with, and
            of the checkpoint that this process went on from, which nothing has proven.

    Raises:
        NoGoodCheckpoint: there is nothing to go back to.
    """
    usable = [save for save in saves if save.finite and save.step <= onset]
    good = sorted((save.step for save in usable if save.status == "good"), reverse=True)
    unproven = {save.step for save in usable if save.status == "candidate"}
    chain = good + [step for step in dict.fromkeys(initial) if step in unproven]
    if not chain:
        raise NoGoodCheckpoint(_nothing(saves, onset))

    tried = [past.target for past in earlier if abs(onset - past.onset) < region]
    older = [step for step in chain if step < min(tried, default=onset + 1)]
    start = min(max(depth, 1), len(good) or 1) - 1
    wanted = chain[start]
    if tried and wanted >= min(tried):
        wanted = older[0] if older else min(chain)
    order = chain[chain.index(wanted) :]
    return Choice(
        order=tuple(order),
        initial=wanted not in good,
        repeated=wanted in tried,
    )


def tainted(saves: Sequence[Saved], *, onset: int) -> list[int]:
    """Checkpoints saved after an onset: to be quarantined."""
    return [save.step for save in saves if save.step > onset and save.status != "quarantined"]


def common(ranks: Sequence[Sequence[Saved]]) -> list[Saved]:
    """The checkpoints that every rank has, as the rank sees them that thinks least of them.

    Args:
        ranks: every rank's list, in the same order everywhere.
    """
    by_step = [{save.step: save for save in saves} for saves in ranks]
    steps = set.intersection(*(set(saves) for saves in by_step)) if by_step else set()
    return [_worst([saves[step] for saves in by_step]) for step in sorted(steps)]


def _worst(saves: Sequence[Saved]) -> Saved:
    return saves[0]._replace(
        status=min((save.status for save in saves), key=_WORST_FIRST.index),
        finite=all(save.finite for save in saves),
        healing=all(save.healing for save in saves),
        nonfinite=tuple(dict.fromkeys(name for save in saves for name in save.nonfinite)),
    )


def _nothing(saves: Sequence[Saved], onset: int) -> str:
    there = ", ".join(
        f"{save.step} ({save.status if save.finite else 'not finite'})" for save in saves[-5:]
    )
    return (
        f"no known-good checkpoint from before the onset at step {onset}, and no initial snapshot; "
        f"there: {there or 'none'}"
    )
