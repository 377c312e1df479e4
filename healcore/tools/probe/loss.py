"""The loss probe: does the curve of a run fall, does it stay low, is its end finite?

A level of the curve is a median over a twentieth of it, so that no single value decides. Levels are
compared in units of their noise, so that the bounds need no scale.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from healcore.console import counted, first_lines, first_of
from healcore.core.detectors import LossSpikeConfig
from healcore.core.signals import CheckedSignals, sanitized
from healcore.core.tape import to_program
from healcore.core.trees import map_leaves
from healcore.history.curves import thin
from healcore.history.run_history import alarm_spans
from healcore.tools.probe.checks import (
    SKIP,
    WARN,
    Check,
    LossInputs,
    NothingToProbe,
    Report,
    check,
    score,
)
from healcore.tools.traces import Trace, lineage
from healcore.tools.traces.trace import Rows, missing_signals

_CURVE_POINTS = 512
"""Number of values of a curve in the JSON document."""
_BLOCKS = 1024
"""Number of block medians to which a long curve is reduced for its levels."""
_END_SHARE = 0.05
"""Fraction of the curve that counts as its start, and as its end."""
_MAD_TO_SIGMA = 1.4826
"""Standard deviation of Gaussian noise divided by its median absolute deviation."""
_MEDIAN_TO_MEAN_SIGMA = 1.2533
"""Standard deviation of a median divided by the standard deviation of a mean: sqrt(pi / 2)."""
_MIN_VALUES_FOR_SMOOTHNESS = 30
"""Values from which the smoothness is judged. For noise, its standard deviation is 2 / sqrt(n)."""
_LASTING_NORMS = 3
"""Number of NaN and Inf at the end of the norms from which the run does not recover."""
_RARE_NORMS = 0.05
"""Fraction of the norms that a loss scale may make infinite in a healthy run."""
_NEAR_ZERO = 0.05
"""Fraction of the first loss from which a loss may reach exactly 0 by rounding or a margin."""
_MAX_NAMED = 10
"""Limit of the instability events that a message names."""
_MOST = {"finite": 0.0, "grad_norm": 0.0, "zero_loss": 0.0}
"""Largest score of a run that fails a check: these runs end without training."""


class Event(NamedTuple):
    """An instability event: the loss rises far above its level, for more than one value."""

    step: float
    """First step above the level."""
    last: float
    """Last step above the level."""
    values: int
    """Number of logged values above the level."""


def probe_loss(trace: Trace, inputs: LossInputs) -> Report:
    """Judges the curve of a run. Ignores rows that the run repeated later.

    Args:
        trace: a trace with a loss. A gradient norm is judged too if it is logged.
        inputs: the bounds.

    Returns:
        The checks, and facts for a plot of the curve.

    Raises:
        NothingToProbe: the trace does not log a loss.
    """
    rows = lineage(trace)
    steps, loss = _column(rows, "loss")
    if not len(loss):
        raise NothingToProbe(f"{trace.name} logs no loss: pass --column loss=NAME")
    is_finite = np.isfinite(loss)
    finite = loss[is_finite]
    events = find_events(steps[is_finite], finite, inputs)
    kept = thin({"value": loss}, _CURVE_POINTS)
    facts: dict[str, Any] = {
        "values": len(loss),
        "files": trace.files,
        "events": events,
        "curve": {"step": steps[kept].tolist(), "value": loss[kept].tolist()},
    }
    notes = first_lines(trace.problems, 100)
    if trace.replaced.any():
        repeated = counted(int(trace.replaced.sum()), "row was", "rows were")
        notes.append(f"{repeated} repeated after a resume or a rollback; the last counts")
    bad = steps[~is_finite]
    message = f"{len(bad)} of {len(loss)} values are NaN or Inf"
    if len(bad):
        message += f", first at {trace.unit} {bad[0]:.15g}; the last {_count_last(~is_finite)}"
    checks = [
        check("finite", len(bad), len(bad) > inputs.max_nonfinite, not is_finite[-1], message)
    ]
    norm_steps, norms = _column(rows, "grad_norm")
    if len(norms):
        bad_norms = ~np.isfinite(norms)
        last = _count_last(bad_norms)
        message = f"{bad_norms.sum()} of {len(norms)} norms are NaN or Inf; the last {last}"
        rare = bad_norms.mean() <= _RARE_NORMS
        checks.append(check("grad_norm", last, not rare, last >= _LASTING_NORMS, message))
    for clause in missing_signals(trace).values():
        checks.append(Check("logged", WARN, f"{clause}, which may be NaN"))
    if len(finite):
        facts |= {"initial_loss": float(finite[0]), "best": float(finite.min())}
    if len(finite) < inputs.min_steps:
        message = f"{counted(len(finite), 'finite value')}; a verdict needs {inputs.min_steps}"
        checks.append(Check("length", SKIP, message, len(finite)))
    else:
        levels = _measure_levels(finite)
        facts |= levels._asdict()
        trained = np.isin(steps, norm_steps[(norms > 0) & (norms < np.inf)])
        zeros = _count_last((loss == 0) & ~trained | ~is_finite)
        if finite[-1] == 0 and inputs.min_steps <= zeros < len(loss):
            message = f"the last {zeros} losses are exactly 0 or not finite, without a gradient"
            sudden = loss[-zeros - 1] > _NEAR_ZERO * levels.start
            checks.append(check("zero_loss", zeros, False, sudden, message))
        checks += _judge_curve(loss, levels, inputs)
        named = []
        for each in events:
            named.append(f"{trace.unit} {each.step:.15g} for {counted(each.values, 'value')}")
        message = f"{len(events)} far above the level before: {first_of(named, _MAX_NAMED)}"
        unfinished = events and events[-1].last == steps[is_finite][-1]
        if unfinished:
            message += "; the curve ends in the last one"
        checks.append(check("instability_events", len(events), events, unfinished, message))
        notes.append(
            f"an instability event within the first {inputs.rolling_window} values is not found, "
            "because the detector learns the noise of the curve there; look at them yourself"
        )
    total = score(checks, _MOST, inputs.weights)
    return Report("loss", trace.name, tuple(checks), facts, tuple(notes), total)


def _column(rows: Rows, signal: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps that log a signal, and the values."""
    logged = rows.logged.get(signal, np.zeros(len(rows.step), bool))
    values = rows.values.get(signal, rows.step)[logged]
    return rows.step[logged], values.astype(np.float64)


def _count_last(flags: np.ndarray) -> int:
    """Number of consecutive true flags at the end."""
    return len(flags) - 1 - int(np.flatnonzero(~flags).max(initial=-1))


class _Levels(NamedTuple):
    """Levels of a curve. Lower is better."""

    start: float
    end: float
    best: float
    noise: float
    """Standard deviation of a level."""
    drop: float
    """First value minus `end`, in standard deviations of one value. Large after a fast start."""


def _measure_levels(finite: np.ndarray) -> _Levels:
    """Measures the levels of finite values, float64 (n,) with n > 3."""
    blocks = np.array_split(finite, min(len(finite), _BLOCKS))
    curve = np.array([np.median(block) for block in blocks])
    width = max(3, round(_END_SHARE * len(curve)))
    medians = np.median(sliding_window_view(curve, width), axis=1)
    single = _estimate_noise(curve)
    # The larger of two estimates: from single values as if they were independent, and from medians
    # of adjacent windows, which include slow drift.
    noise = max(single * _MEDIAN_TO_MEAN_SIGMA / width**0.5, _estimate_noise(medians[::-width]))
    start, end = float(medians[0]), float(medians[-1])
    return _Levels(start, end, float(medians.min()), noise, _ratio(curve[0] - end, single))


def _estimate_noise(curve: np.ndarray) -> float:
    """Estimates the standard deviation of the noise of a curve (b,); 0 for fewer than 4 values.

    Uses second differences, which remove a slope and multiply the variance of white noise by six.
    The estimate is enlarged for few values, whose median may be small by chance.
    """
    if len(curve) < 4:
        return 0.0
    bends = np.abs(np.diff(curve, 2))
    return _MAD_TO_SIGMA * float(np.median(bends)) / math.sqrt(6) * (1 + 4 / len(bends))


def _ratio(distance: float, noise: float) -> float:
    """A distance in units of the noise; infinite or NaN without noise."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.divide(distance, noise))


def _judge_curve(loss: np.ndarray, levels: _Levels, inputs: LossInputs) -> list[Check]:
    """Judges the levels of the curve, and its smoothness."""
    finite = loss[np.isfinite(loss)]
    start, end, best, noise, drop = levels
    bound = inputs.trend_sigmas
    margin = math.sqrt(2) * bound * noise
    rise = _ratio(end - start, math.sqrt(2) * noise)
    # The loss of a policy gradient is about 0 by construction, and need not fall.
    falls = rise < -bound or drop > bound or finite.min() < 0 < finite.max()
    span = f"from {start:.4g} to {end:.4g}, {rise:+.1f} sigma; significant from {bound:g} sigma"
    most = inputs.max_final_loss
    checks = [
        check("final_loss", end, False, most is not None and end > most, f"{end:.6g}"),
        check("progress", rise, not falls, rise > bound, span),
    ]
    if min(start, finite.min()) > 0:
        ratio = end / start
        warn = end > inputs.max_convergence_ratio * start + margin
        message = (
            f"the end is {ratio:.4g} of the start; WARN above {inputs.max_convergence_ratio:g}"
        )
        checks.append(check("convergence_ratio", ratio, warn, False, message))
    lost = 0.0
    # The margin is larger, because noise alone puts the lowest of many medians below the rest.
    if start > best and end - best > 2 * bound * noise:
        lost = min(1.0, (end - best) / (start - best))
    message = f"the end, {end:.4g}, has lost {lost:.1%} of the progress to the best, {best:.4g}"
    message += f"; WARN above {inputs.warn_regret:.0%}, FAIL above {inputs.fail_regret:.0%}"
    warn, fail = lost > inputs.warn_regret, lost > inputs.fail_regret
    checks.append(check("regret", lost, warn, fail, message))
    if len(finite) >= _MIN_VALUES_FOR_SMOOTHNESS and finite.var() > 0:
        changes = np.diff(loss)
        smoothness = 1 - changes[np.isfinite(changes)].var() / finite.var()
        message = (
            f"{smoothness:.3f}; noise around a level has -1; WARN below {inputs.min_smoothness:g}"
        )
        warn = smoothness < inputs.min_smoothness
        checks.append(check("smoothness", float(smoothness), warn, False, message))
    return checks


def find_events(steps: np.ndarray, finite: np.ndarray, inputs: LossInputs) -> list[Event]:
    """Finds the instability events of a curve with the spike detector of the policy engine.

    An event begins at its first alarm, as in a replay. A single high value is a bad batch and no
    event.

    Args:
        steps: steps of the values, float64 (n,).
        finite: finite losses, float64 (n,).
        inputs: `event_sigmas` and `rolling_window` are the threshold and the window of the
            detector.

    Returns:
        The events, in order.
    """
    config = LossSpikeConfig(inputs.event_sigmas, window=inputs.rolling_window)
    seen = CheckedSignals._make([None] * len(CheckedSignals._fields))
    seen = seen._replace(finite=np.True_, restart=np.False_)

    def judge(state: Any, loss: Any) -> Any:
        state, result = config.update(state, seen._replace(loss=loss))
        return state, (result.alarm | result.sustained, result.sustained)

    state = map_leaves(lambda leaf: leaf[()], config.init())
    flags = []
    with np.errstate(all="ignore"):  # as in the engine
        values, _ = sanitized(finite.astype(np.float32), -np.inf, np.inf)
        program = to_program(judge, state, np.float32(0))
        for value in values:
            state, row = program(state, value)
            flags.append(row)
    alarm, sustained = np.array(flags, bool).reshape(-1, 2).T
    events: list[Event] = []
    for first, last in alarm_spans(alarm):
        if sustained[first : last + 1].any():
            events.append(Event(float(steps[first]), float(steps[last]), last - first + 1))
    return events
