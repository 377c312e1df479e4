"""Finds sustained spikes in hindsight, for traces without labels.

This is not a detector: it also uses the rows after a spike, and decides nothing in a run. Level and
noise come from earlier clean rows, which are in no event. A first pass finds events, and a second
pass excludes them:

* The level is the median of the last 16 clean rows.
* The noise is a 90 % quantile over the last 48 clean rows, and at least level / 1024. Its input is
  the larger of the rise above the level and the change since the previous row.
* An event begins where a row, and the median of the row and the next four, exceed the level by more
  than 2 noises. It ends where this median has lost 70 % of its rise, or after 400 rows. Events less
  than 24 rows apart are one event.
* An event above 3 noises is a spike. A lower event is ambiguous: an order there is neither right
  nor wrong. The first 64 rows have too little history for events.

`tests/tools/sweep/test_hindsight.py` states the agreement with the labels of the recorded runs.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from healcore.tools.replay.scores import Label, Zone

_LEVEL_ROWS = 16
_NOISE_ROWS = 48
_NOISE_QUANTILE = 0.9
_MIN_NOISE = 2.0**-10  # relative to the level
_AHEAD_ROWS = 5
_SPIKE_RISE = 3.0  # in noises
_ONSET_RISE = 2.0  # in noises
_END_FRACTION = 0.3  # of the largest rise
_MAX_ROWS = 400
_MIN_GAP = 24
_PASSES = 2


def events_in(loss: np.ndarray, index: np.ndarray, name: str) -> Label:
    """Finds the events of one trace from the loss (n,) of its rows `index`, int64 (n,)."""
    x = loss.astype(np.float64)
    x, index = x[np.isfinite(x)], index[np.isfinite(x)]
    clean = np.ones(len(x), bool)
    spikes: list[tuple[int, int]] = []
    ambiguous: list[tuple[int, int]] = []
    for _ in range(_PASSES):
        if clean.sum() < _LEVEL_ROWS + _NOISE_ROWS + 1 or len(x) < _AHEAD_ROWS:
            return Label(name, len(loss), (), ())
        spikes, ambiguous = _find_events(x, clean)
        clean[:] = True
        for first, last in spikes + ambiguous:
            clean[first : last + 1] = False
    return Label(name, len(loss), _zones(spikes, index), _zones(ambiguous, index))


def _find_events(x: np.ndarray, clean: np.ndarray) -> tuple[list[tuple[int, int]], ...]:
    """Returns first and last rows of spikes and of ambiguous events, given the clean rows."""
    history = x[clean]
    # level[i] is the level at clean row _LEVEL_ROWS + i.
    level = np.median(sliding_window_view(history, _LEVEL_ROWS), axis=1)
    # One-sided, because a steeply falling loss stays below its level, which is not noise.
    changes = np.abs(np.diff(history))[_LEVEL_ROWS - 1 :]
    deviations = np.maximum(changes, history[_LEVEL_ROWS:] - level[:-1])
    noise = np.quantile(sliding_window_view(deviations, _NOISE_ROWS), _NOISE_QUANTILE, axis=1)
    level = level[_NOISE_ROWS:]
    noise = np.maximum(noise, _MIN_NOISE * np.abs(level))
    first = _LEVEL_ROWS + _NOISE_ROWS  # number of clean rows before the first event
    count = np.cumsum(clean) - clean  # number of clean rows before each row
    ahead = np.median(sliding_window_view(x, _AHEAD_ROWS), axis=1)
    spikes, ambiguous = [], []
    row = int(np.searchsorted(count, first))
    while row < len(ahead):
        k = count[row] - first
        rise = min(ahead[row], x[row]) - level[k]
        if rise <= _ONSET_RISE * noise[k]:
            row += 1
            continue
        end = _find_end(ahead, row, float(level[k]), float(noise[k]))
        top = np.max(ahead[row : end + 1]) - level[k]
        (spikes if top > _SPIKE_RISE * noise[k] else ambiguous).append((row, min(end, len(x) - 1)))
        row = end + 1
    return spikes, ambiguous


def _find_end(ahead: np.ndarray, row: int, level: float, noise: float) -> int:
    """Returns the last row of an event that begins at `row`."""
    last = min(row + _MAX_ROWS, len(ahead) - 1)
    top = ahead[row] - level
    for i in range(row + 1, last + 1):
        top = max(top, ahead[i] - level)
        if ahead[i] - level < max(_END_FRACTION * top, noise):
            return i
    return last


def _join_close(events: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins events less than `_MIN_GAP` rows apart."""
    joined: list[tuple[int, int]] = []
    for first, last in events:
        if joined and first - joined[-1][1] < _MIN_GAP:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return joined


def _zones(events: list[tuple[int, int]], index: np.ndarray) -> tuple[Zone, ...]:
    return tuple(Zone(int(index[first]), int(index[last])) for first, last in _join_close(events))
