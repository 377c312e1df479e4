"""Chooses the checkpoint to restore: pure functions of the checkpoints and of earlier rollbacks.

A checkpoint of step n holds the state after n optimizer steps. Steps are counted from 0, so step n
starts from this state. A checkpoint of the onset's step holds the last state before the trouble.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from healcore.runtime.store.errors import NoGoodCheckpoint
from healcore.runtime.store.saved import Saved, Status

_WORST_FIRST: tuple[Status, ...] = ("abandoned", "candidate", "good")


class CheckpointChoice(NamedTuple):
    """The checkpoint to restore."""

    order: tuple[int, ...]
    """Steps of the checkpoints to try: the choice, then older ones in case it is damaged."""
    initial: bool
    """Whether the choice is an initial snapshot, because no known-good checkpoint is left."""
    repeated: bool
    """Whether an earlier rollback for this trouble restored the same, oldest checkpoint."""


def choose(
    saves: Sequence[Saved],
    *,
    onset: int,
    depth: int = 1,
    tried: Sequence[int] = (),
    initial: Sequence[int] = (),
    exact: bool = False,
) -> CheckpointChoice:
    """Chooses a known-good checkpoint, or as a last resort an initial one.

    Args:
        saves: the checkpoints; with several ranks the result of `common_to_ranks`.
        onset: step of the incident's first alarm.
        depth: 1 for the newest known-good checkpoint before the onset, 2 for the next older one.
        tried: steps of the checkpoints that were restored for the same trouble. The choice is
            older, because newer known-good checkpoints lead into the same trouble.
        initial: steps of the snapshot that the run began with, and of the checkpoint that this
            process resumed from, which need not be known-good.
        exact: whether the state is known to be sound up to the onset, or its weights have been
            compared. Then each finite checkpoint up to the onset can be restored.

    Raises:
        NoGoodCheckpoint: there is no such checkpoint.
    """
    usable = [save for save in saves if save.finite and save.step <= onset]
    known_good = {save.step for save in usable if save.status == "good"}
    candidates = {save.step for save in usable if save.status == "candidate"}
    good = sorted(known_good | candidates if exact else known_good, reverse=True)
    choices = good + sorted(candidates & {*initial} - {*good}, reverse=True)
    if not choices:
        raise NoGoodCheckpoint(_no_checkpoint_text(saves, onset))

    older = [step for step in choices if step < min(tried, default=onset + 1)]
    start = min(max(depth, 1), len(good) or 1) - 1
    chosen = choices[start]
    if tried and chosen >= min(tried):
        chosen = older[0] if older else min(choices)
    order = [step for step in choices if step <= chosen]
    return CheckpointChoice(
        order=tuple(order),
        initial=chosen not in known_good and (not exact or len(choices) == 1),
        repeated=chosen in tried,
    )


def common_to_ranks(ranks: Sequence[Sequence[Saved]]) -> list[Saved]:
    """The checkpoints that all ranks have, each with its worst status on any rank."""
    by_step = [{save.step: save for save in saves} for saves in ranks]
    steps = set.intersection(*(set(saves) for saves in by_step)) if by_step else set()
    return [_worst([saves[step] for saves in by_step]) for step in sorted(steps)]


def _worst(saves: Sequence[Saved]) -> Saved:
    return saves[0]._replace(
        status=min((save.status for save in saves), key=_WORST_FIRST.index),
        finite=all(save.finite for save in saves),
        nonfinite=tuple(dict.fromkeys(name for save in saves for name in save.nonfinite)),
    )


def _no_checkpoint_text(saves: Sequence[Saved], onset: int) -> str:
    listed = ", ".join(
        f"{save.step} ({save.status if save.finite else 'not finite'})" for save in saves[-5:]
    )
    return (
        f"no known-good checkpoint from before the onset at step {onset}, and no initial snapshot; "
        f"there: {listed or 'none, and a rollback needs a store'}"
    )
