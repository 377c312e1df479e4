"""Which anchors are compared, and which are kept: pure functions of the anchors."""

from __future__ import annotations

from collections.abc import Sequence

from healcore.runtime.run.compare.evidence import SAMPLE_SIZE, Anchor

MAX_ANCHORS = 3
"""Max number of anchors."""
MIN_AGE = 0.5
"""Min age of a compared anchor, as a share of the run so far, up to one checkpoint interval."""


def with_new(anchors: Sequence[Anchor], new: Anchor) -> list[Anchor]:
    """The anchors to keep after another checkpoint, oldest first.

    The anchor with the lowest mean loss stays, and the anchors of the last two checkpoints. Two
    recent anchors are not enough: after slow damage both of them would already have a part of it.

    Args:
        anchors: the anchors so far, oldest first.
        new: the anchor of the current weights.

    Returns:
        At most `MAX_ANCHORS` anchors.
    """
    if len(anchors) < MAX_ANCHORS:
        return [*anchors, new]
    *older, last = anchors
    best = min(older, key=lambda anchor: (anchor.level_or_inf, -anchor.step))
    return [best, last, new]


def to_compare(
    anchors: Sequence[Anchor], index: int, *, every: int, best: Anchor | None = None
) -> list[Anchor]:
    """Anchors to compare with: the newest old enough, `best`, and old anchors with evidence.

    Weights of a few steps ago differ too little, and are as damaged as the current weights. After
    `SAMPLE_SIZE` steps an anchor's sample is full.

    Args:
        anchors: all anchors, oldest first.
        index: the step at which weights are compared.
        every: steps of a checkpoint interval.
        best: an anchor to compare with at any age, or None.

    Returns:
        The anchors, oldest first.
    """
    age = max(SAMPLE_SIZE, min(every, int(MIN_AGE * index)))
    old = [anchor for anchor in anchors if index + 1 - anchor.step >= age]
    chosen = []
    for anchor in anchors:
        is_suspect = anchor in old and (anchor is old[-1] or anchor.evidence > 1)
        if anchor is best or is_suspect:
            chosen.append(anchor)
    return chosen


def best_on_average(anchors: Sequence[Anchor], mean: float, index: int) -> Anchor | None:
    """The anchor with the lowest mean loss, if the mean loss exceeds it by more than its spread.

    Args:
        anchors: all anchors, oldest first.
        mean: mean of the last training losses.
        index: the newest step. An anchor of a few steps ago has no sample yet, and is not returned.
    """
    best = min(anchors, key=lambda anchor: anchor.level_or_inf, default=None)
    if best is None or index - best.step < SAMPLE_SIZE:
        return None
    if mean > best.level_or_inf + best.spread:
        return best
    return None


def newest_better(anchors: Sequence[Anchor], anchor: Anchor, strong: float) -> Anchor:
    """The newest anchor up to the onset with strong evidence, or `anchor`.

    A rollback to it repeats fewer steps.

    Args:
        anchors: all anchors, oldest first.
        anchor: the anchor whose evidence is sufficient.
        strong: evidence that an anchor needs in order to take its place.
    """
    onset = anchor.step
    if anchor.onset is not None:
        onset = anchor.onset
    newest = anchor
    for each in anchors:
        if anchor.step < each.step <= onset and each.evidence >= strong:
            newest = each
    return newest
