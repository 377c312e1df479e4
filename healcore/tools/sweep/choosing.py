"""Which setting to take: the middle of a plateau, not the single best.

Of thousands of settings the best one on some traces is partly the luckiest. So each setting's
score is first averaged with that of its nearest neighbours in the search space; those whose average
comes close to the best average are the plateau; and of these the one in its middle is taken, that
with the smallest mean distance to all the others. A number that makes no difference thereby stays
near the middle of its range.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_NEIGHBOURS = 8  # the setting itself included
_CLOSE = 0.1  # of the way from the median setting to the best one
_BLOCK = 256


class Choice(NamedTuple):
    """A setting and the plateau that it lies on."""

    index: int
    best: int
    """The setting with the best score of its own."""
    plateau: np.ndarray
    """bool (variants,)."""
    smooth: np.ndarray
    """float64 (variants,): scores averaged with their neighbours'."""


def choose(units: np.ndarray, scores: np.ndarray) -> Choice:
    """Picks a setting.

    Args:
        units: (variants, axes) in the unit cube; the base policy first.
        scores: (variants,), larger is better.
    """
    smooth = _smoothed(units, scores)
    top = smooth.max()
    close = top - _CLOSE * (top - np.median(smooth))
    plateau = smooth >= close
    members = units[plateau]
    off_middle = np.concatenate(
        [
            np.sqrt(_distances(members[i : i + _BLOCK], members)).mean(axis=1)
            for i in range(0, len(members), _BLOCK)
        ]
    )
    # The setting itself should be good, too, not only its neighbourhood.
    own = scores[plateau] >= close
    order = np.lexsort((off_middle, ~own))
    index = int(np.flatnonzero(plateau)[order[0]])
    return Choice(index, int(scores.argmax()), plateau, smooth)


def _smoothed(units: np.ndarray, scores: np.ndarray) -> np.ndarray:
    count = min(_NEIGHBOURS, len(units))
    smooth = np.empty(len(units))
    for start in range(0, len(units), _BLOCK):
        part = slice(start, start + _BLOCK)
        near = np.argpartition(_distances(units[part], units), count - 1, axis=1)[:, :count]
        smooth[part] = scores[near].mean(axis=1)
    return smooth


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Squared distances, (len(a), len(b))."""
    return ((a[:, None, :] - b[None, :, :]) ** 2).sum(axis=-1)
