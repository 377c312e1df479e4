"""Sustained spikes seen in hindsight, for traces that nobody has labelled.

Not a detector: it looks at the rows after as well as before, and it decides nothing in a run. By
the rows before that are in no event (found in a first pass, left out in a second):

* level: the median of the last 16 of them; noise: what 90 % of the last 48 rose above the level
  before them or moved from one row to the next, whichever is more, and never less than a 1024th of
  the level;
* an event begins where the row, and the median of it and the next four, stand above the level by
  more than the noise's limit; it ends where that median has lost 70 % of its rise, at the latest
  after 400 rows; events less than 24 rows apart are one;
* more than 3 noises at its top make a spike; more than 2 a bump, which is ambiguous: neither right
  nor wrong to react to. The first 64 rows have no history, and no events.

docs/sweep.md reports how it agrees with the labels of the recorded runs.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from healcore.tools.replay.scores import Label, Zone

_BEFORE = 16
_AHEAD = 5
_SPIKE = 3.0
_BUMP = 2.0
_INNER = 0.9
_NOISE_OF = 48
_PASSES = 2
_BACK = 0.3
_LONGEST = 400
_ROUNDING = 2.0**-10
_JOINED = 24


def events_in(loss: np.ndarray, index: np.ndarray, name: str) -> Label:
    """The events of one trace.

    Args:
        loss: float32 (n,), as recorded.
        index: int64 (n,): the row of the trace that each is.
        name: of the trace.
    """
    x = loss.astype(np.float64)
    x, index = x[np.isfinite(x)], index[np.isfinite(x)]
    clean = np.ones(len(x), bool)
    spikes: list[tuple[int, int]] = []
    bumps: list[tuple[int, int]] = []
    for _ in range(_PASSES):
        if clean.sum() < _BEFORE + _NOISE_OF + 1 or len(x) < _AHEAD:
            return Label(name, len(loss), (), ())
        spikes, bumps = _found(x, clean)
        clean[:] = True
        for first, last in spikes + bumps:
            clean[first : last + 1] = False
    return Label(name, len(loss), _zones(spikes, index), _zones(bumps, index))


def _found(x: np.ndarray, clean: np.ndarray) -> tuple[list[tuple[int, int]], ...]:
    """Spikes and bumps over a history of clean rows."""
    history = x[clean]
    level = np.median(
        sliding_window_view(history, _BEFORE), axis=1
    )  # of the rows before _BEFORE + i
    # One-sided: where a loss falls steeply it stays below its level, and that is no noise.
    steps = np.abs(np.diff(history))[_BEFORE - 1 :]
    off = np.maximum(steps, history[_BEFORE:] - level[:-1])
    noise = np.quantile(sliding_window_view(off, _NOISE_OF), _INNER, axis=1)
    level = level[_NOISE_OF:]
    noise = np.maximum(noise, _ROUNDING * np.abs(level))
    first = _BEFORE + _NOISE_OF  # clean rows that have to be there before
    count = np.cumsum(clean) - clean  # clean rows before each row
    ahead = np.median(sliding_window_view(x, _AHEAD), axis=1)
    spikes, bumps = [], []
    row = int(np.searchsorted(count, first))
    while row < len(ahead):
        k = count[row] - first
        rise = min(ahead[row], x[row]) - level[k]
        if rise <= _BUMP * noise[k]:
            row += 1
            continue
        end = _end(ahead, row, float(level[k]), float(noise[k]))
        top = np.max(ahead[row : end + 1]) - level[k]
        (spikes if top > _SPIKE * noise[k] else bumps).append((row, min(end, len(x) - 1)))
        row = end + 1
    return spikes, bumps


def _end(ahead: np.ndarray, row: int, level: float, noise: float) -> int:
    """The last row of an event that begins at `row`."""
    last = min(row + _LONGEST, len(ahead) - 1)
    top = ahead[row] - level
    for i in range(row + 1, last + 1):
        top = max(top, ahead[i] - level)
        if ahead[i] - level < max(_BACK * top, noise):
            return i
    return last


def _joined(found: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Events that nearly touch, as one."""
    joined: list[tuple[int, int]] = []
    for first, last in found:
        if joined and first - joined[-1][1] < _JOINED:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return joined


def _zones(found: list[tuple[int, int]], index: np.ndarray) -> tuple[Zone, ...]:
    return tuple(Zone(int(index[a]), int(index[b])) for a, b in _joined(found))
