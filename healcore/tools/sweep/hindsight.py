"""Finds sustained spikes in hindsight, for traces without labels.

This is not a detector: it also uses the rows after a spike, and decides nothing in a run. Level and
noise come from the rows before that are in no event (a first pass finds events, a second leaves
them out):

* level: the median of the last 16 such rows; noise: the 90 % quantile, over the last 48, of the
  larger of the rise above the level and the change since the row before; at least level / 1024;
* an event begins where the row, and the median of it and the next four, exceed the level by more
  than 2 noises; it ends where that median has lost 70 % of its rise, or after 400 rows; events
  less than 24 rows apart are one;
* a top above 3 noises is a spike; a lower one is a bump, which is ambiguous: a reaction to it is
  neither right nor wrong. The first 64 rows have no history, and no events.

docs/sweep.md reports the agreement with the labels of the recorded runs.
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
    """The events of one trace, from the loss of its rows `index` (int64)."""
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
    # level[i] is of the clean rows before row _BEFORE + i.
    level = np.median(sliding_window_view(history, _BEFORE), axis=1)
    # One-sided: a steeply falling loss stays below its level, which is not noise.
    steps = np.abs(np.diff(history))[_BEFORE - 1 :]
    off = np.maximum(steps, history[_BEFORE:] - level[:-1])
    noise = np.quantile(sliding_window_view(off, _NOISE_OF), _INNER, axis=1)
    level = level[_NOISE_OF:]
    noise = np.maximum(noise, _ROUNDING * np.abs(level))
    first = _BEFORE + _NOISE_OF  # clean rows that an event needs before it
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
    """Events less than `_JOINED` rows apart, as one."""
    joined: list[tuple[int, int]] = []
    for first, last in found:
        if joined and first - joined[-1][1] < _JOINED:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return joined


def _zones(found: list[tuple[int, int]], index: np.ndarray) -> tuple[Zone, ...]:
    return tuple(Zone(int(index[a]), int(index[b])) for a, b in _joined(found))
