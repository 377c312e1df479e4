"""To which checkpoint a run rolls back. Steps are counted from 0.

A checkpoint of step n holds the state that step n starts from, so a checkpoint of the onset's step
holds the last state before the trouble.
"""

from __future__ import annotations

from collections.abc import Sequence

from healcore.runtime.store.saved import NoGoodCheckpoint, Saved


def choose_checkpoints(
    saves: Sequence[Saved],
    *,
    onset: int,
    depth: int = 1,
    tried: Sequence[int] = (),
    initial: Sequence[int] = (),
    sound_until_onset: bool = False,
) -> tuple[int, ...]:
    """Chooses a known-good checkpoint, or as a last resort an initial one.

    Returns the steps to try: the choice, then older ones in case it is damaged.

    Args:
        saves: the checkpoints.
        onset: step of the incident's first alarm.
        depth: 1 for the newest known-good checkpoint before the onset, 2 for the next older one.
        tried: steps of the checkpoints that were restored for the same trouble. The choice is
            older, because newer known-good checkpoints lead into the same trouble.
        initial: steps of the snapshot that the run began with, and of the checkpoint that this
            process resumed from, which need not be known-good.
        sound_until_onset: whether the state is known to be sound up to the onset, or its weights
            have been compared. Then each finite checkpoint up to the onset can be restored.

    Raises:
        NoGoodCheckpoint: there is no such checkpoint.
    """
    usable = [save for save in saves if save.finite and save.step <= onset]
    known_good = {save.step for save in usable if save.status == "good"}
    candidates = {save.step for save in usable if save.status == "candidate"}
    good = sorted(known_good | candidates if sound_until_onset else known_good, reverse=True)
    choices = good + sorted(candidates & {*initial} - {*good}, reverse=True)
    if not choices:
        listed = [f"{s.step} ({s.status if s.finite else 'not finite'})" for s in saves[-5:]]
        raise NoGoodCheckpoint(
            f"no known-good checkpoint from before the onset at step {onset}, and no initial "
            f"snapshot; there: {', '.join(listed) or 'none, and a rollback needs a store'}"
        )
    older = [step for step in choices if step < min(tried, default=onset + 1)]
    start = min(max(depth, 1), len(good) or 1) - 1
    chosen = choices[start]
    if tried and chosen >= min(tried):
        chosen = older[0] if older else min(choices)
    return tuple(step for step in choices if step <= chosen)
