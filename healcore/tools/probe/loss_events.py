"""Finds instability events in a loss curve, with sliding windows and with the spike detector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from healcore.core import numerics
from healcore.core.detectors import LossSpikeConfig
from healcore.core.recorded import record
from healcore.core.signals import Observed
from healcore.core.tree import map_leaves
from healcore.tools.probe.inputs import EVENT_SIGMAS
from healcore.tools.probe.loss_curve import MAD_TO_SIGMA, block_medians

_UNIT_VALUES = 64
"""Least number of values that the noise unit is estimated from."""
_Q90_TO_SIGMA = 1 / 1.2816
"""Standard deviation of Gaussian noise divided by its 90 % quantile."""
_MIN_UNIT = 1e-3
"""Lower bound of the noise unit relative to the level, for curves without noise."""
_ONSET_VALUES, _HIGH_VALUES = 5, 3
"""Consecutive values that decide whether an event begins, and how many of these must be high."""
_RETURN_HEIGHT = 3.0
"""An event ends at the first value less than this many units above the level before the event."""
_MAX_EVENT_VALUES = 200
"""Largest length of an event. A longer rise is a new level, and the baseline starts again."""
_CHUNK = 4096
"""Number of windows in memory at a time."""

MAX_VALUES = 16_384
"""Largest number of values for the detector. A longer curve is reduced to block medians."""
_HIGH_SIGMAS, _END_FRACTION = 3.0, 0.1
"""An event ends at its last value above 3 standard deviations and above 0.1 of its maximum."""
_MAX_LEAD, _QUIET_VOTES = 12, 0.5
"""An event begins at most 12 values before detection, after the last value with votes below 0.5."""
_CHANGE_TO_SIGMA = 0.886
"""Standard deviation of Gaussian noise divided by the mean absolute difference of neighbours."""
_TRUE, _FALSE = np.bool_(True), np.bool_(False)


class Event(NamedTuple):
    """One instability event, from step `step` to step `last`, over `values` logged values."""

    step: float
    values: int
    height: float
    """Highest value minus the level before the event, in noise units."""
    back: bool
    """Whether the curve returned to the level before the event."""
    last: float


class Events(NamedTuple):
    """Instability events of a curve, in order."""

    events: tuple[Event, ...]
    jumps: int
    """Number of single high values: bad batches."""
    unfinished: Event | None
    """The event that the curve ends in, or None."""


def find_events(steps: np.ndarray, values: np.ndarray, sigmas: float, window: int) -> Events:
    """Finds the events of a curve, float64 (n,) both.

    The detector adds the events that overlap no event of the windows.
    """
    found, jumps, unfinished = window_events(steps, values, sigmas, window)
    new = [
        other
        for other in detector_events(steps, values, sigmas)
        if not any(known.step <= other.last and other.step <= known.last for known in found)
    ]
    alone = sum(not any(event.step <= step <= event.last for event in new) for step in jumps)
    return Events(tuple(sorted([*found, *new])), alone, unfinished)


# -- by sliding windows ----------------------------------------------------------------------------


def window_events(
    steps: np.ndarray, values: np.ndarray, sigmas: float, window: int
) -> tuple[list[Event], list[float], Event | None]:
    """Returns the events, the steps of single high values, and the event that the curve ends in.

    The level of a value is the median of the `window` values before it. The noise unit is a robust
    deviation of the last 64 values (or four windows) from their levels. The unit is the larger of
    two estimates, from the median and from the upper tail, because noise may be one-sided. An
    event begins where 3 of five values in a row are more than `sigmas` units high. A single high
    value is a bad batch and counts as a jump.
    """
    unit_window = max(_UNIT_VALUES, 4 * window)
    with np.errstate(invalid="ignore", over="ignore"):
        levels = _rolling(values, window, lambda windows: np.median(windows, axis=1))
        rises = values - levels
        units = np.maximum(_rolling(rises, unit_window, _noise), _MIN_UNIT * np.abs(levels))
        units = np.where(units > 0, units, np.inf)
        heights = rises / units
    events: list[Event] = []
    jumps: list[float] = []
    unfinished = None
    following = 2 * window  # levels before this value are unreliable
    for onset in np.flatnonzero(heights > sigmas).tolist():
        if onset < following:  # inside the previous event
            continue
        over = (values[onset : onset + _MAX_EVENT_VALUES] - levels[onset]) / units[onset]
        # After many recent jumps, several high values in a row may be chance.
        recent = rises[max(0, onset - unit_window) : onset] / units[onset] > sigmas
        needed = _ONSET_VALUES + 2 * int(np.count_nonzero(recent))
        if np.count_nonzero(over[:needed] > sigmas) < _HIGH_VALUES * needed / _ONSET_VALUES:
            jumps.append(float(steps[onset]))
            following = onset + 1
            continue
        low = np.flatnonzero(over < _RETURN_HEIGHT)
        # A low value among the first values does not end an event.
        low = low[low >= _HIGH_VALUES]
        length = int(low[0]) if len(low) else len(over)
        following = onset + length
        first, last = float(steps[onset]), float(steps[following - 1])
        events.append(Event(first, length, float(over[:length].max()), bool(len(low)), last))
        if not len(low) and length < _MAX_EVENT_VALUES:
            unfinished = events[-1]
    return events, jumps, unfinished


def _rolling(
    values: np.ndarray, window: int, function: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Applies a function to the `window` values before each value; NaN before the first value."""
    windows = sliding_window_view(np.append(np.full(window, np.nan), values[:-1]), window)
    parts = [function(windows[at : at + _CHUNK]) for at in range(0, len(windows), _CHUNK)]
    return np.concatenate(parts) if len(values) else np.empty(0)


def _noise(windows: np.ndarray) -> np.ndarray:
    """Robust standard deviation of the noise in each window, float64 (k, n) -> (k,)."""
    # The NaN variants are several times slower, and only partly filled windows need them.
    full = not np.isnan(windows).any()
    known = windows if full else windows[~np.isnan(windows).all(axis=1)]
    median, quantile = (np.median, np.quantile) if full else (np.nanmedian, np.nanquantile)
    spread = MAD_TO_SIGMA * median(np.abs(known), axis=1)
    units = np.maximum(spread, _Q90_TO_SIGMA * quantile(known, 0.9, axis=1))
    return np.append(np.full(len(windows) - len(known), np.nan), units)


# -- by the spike detector -------------------------------------------------------------------------


def detector_events(steps: np.ndarray, values: np.ndarray, sigmas: float) -> list[Event]:
    """Finds events with the spike detector, `LossSpikeConfig`.

    The detector learns the noise of the run. It finds events that windows miss: a spike soon after
    another spike, recurring high values, and rises that begin slowly. It takes about 40 us per
    value, so a long curve is reduced to block medians. `sigmas` scales its threshold.
    """
    default = LossSpikeConfig()
    config = default._replace(z_threshold=default.z_threshold * sigmas / EVENT_SIGMAS)
    steps, reduced = block_medians(steps, MAX_VALUES), block_medians(values, MAX_VALUES)
    size = max(1, round(len(values) / max(1, len(reduced))))
    votes, heights, sustained = _run_detector(map_leaves(_scalar, config), reduced)
    edges = np.diff(sustained.astype(np.int8), prepend=0, append=0)
    events: list[Event] = []
    last_first, last = 0, -1
    for onset, end in zip(np.flatnonzero(edges > 0), np.flatnonzero(edges < 0), strict=True):
        first = max(0, onset - _MAX_LEAD)
        quiet = np.flatnonzero(votes[first:onset] < _QUIET_VOTES)
        first += int(quiet[-1]) + 1 if len(quiet) else 0
        rising = first + np.flatnonzero(heights[first:onset] > _HIGH_SIGMAS)
        # A small sustained rise has no value above _HIGH_SIGMAS.
        first = int(rising[0]) if len(rising) else int(onset)
        if first <= last:  # the votes have not faded, so the last event continues
            first = last_first
            events.pop()
        over = max(_HIGH_SIGMAS, _END_FRACTION * heights[first:end].max())
        high = first + np.flatnonzero(heights[first:end] > over)
        last = int(high[-1]) if len(high) else int(end) - 1
        last_first = first
        events.append(
            Event(
                step=float(steps[first]),
                values=(last + 1 - first) * size,
                height=float(heights[first:end].max()),
                back=bool(end < len(steps) and end - onset < 2 * config.window),
                last=float(steps[last]),
            )
        )
    return events


def _run_detector(config: Any, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns votes, heights in standard deviations, and sustained flags, each (n,)."""
    losses = numerics.bounded(values.astype(np.float32), True, xp=np)
    state = map_leaves(_scalar, config.init())
    votes, heights = np.zeros(len(losses)), np.zeros(len(losses))
    sustained = np.zeros(len(losses), np.bool_)
    # The engine also allows overflows and divisions by 0.
    update = None
    with np.errstate(all="ignore"):
        for at, loss in enumerate(losses):
            observed = Observed(
                loss, None, None, None, None, _FALSE, None, None, _TRUE, None, _FALSE
            )
            if update is None:
                update = record(config.update, state, observed)
            state, reading = update(state, observed)
            # `lasting` keeps an event open over single steps that return to the level.
            votes[at], sustained[at] = state.votes, reading.sustained or state.lasting > 0
            heights[at] = reading.z / _CHANGE_TO_SIGMA
    return votes, heights, sustained


def _scalar(value: Any) -> Any:
    return np.asarray(value)[()]
